"""Record what OpenCV 5 warps: opencv-python-headless 5.0.0.93 on x86-64 with AVX2 (only one version is installed).

pip install --target /tmp/cv5 --no-deps opencv-python-headless==5.0.0.93
PYTHONPATH=/tmp/cv5:. python -m tests.references.opencv5
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
HEIGHT, WIDTH = 45, 67
MATRICES = {
    "affine": [[0.9, 0.31, -4.3], [-0.27, 1.1, 6.7], [0, 0, 1]],
    "shrunk": [[0.43, 0.0, 3.1], [0.0, 0.43, 2.9], [0, 0, 1]],
    "perspective": [[1.1, 0.2, -6.2], [-0.1, 1.3, 3.3], [0.0021, -0.0013, 1]],
}


def make_image() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (40, 60, 3), dtype=np.uint8)


if __name__ == "__main__":
    import cv2

    border = {"dsize": (WIDTH, HEIGHT), "borderValue": (114, 114, 114)}
    warped = {
        name: cv2.warpPerspective(make_image(), np.array(m), **border)
        if name == "perspective"
        else cv2.warpAffine(make_image(), np.array(m)[:2], **border)
        for name, m in MATRICES.items()
    }
    np.savez_compressed(FILE, **warped)
