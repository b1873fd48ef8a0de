"""tools/cuda12.py without its downloads."""

from tools import cuda12


def test_the_layout_of_a_toolkit(tmp_path):
    """Debian has nvcc's parts in five folders; nvcc finds them by its profile."""
    own, cccl, home = "usr/lib/nvidia-cuda-toolkit", tmp_path / "cccl", tmp_path / "toolkit"
    parts = [f"{own}/bin/{name}" for name in ("cicc", "crt/link.stub", "g++", "gcc", "nvcc", "nvcc.profile")]
    parts += [f"{own}/libdevice/libdevice.10.bc", "usr/bin/nvcc", "usr/bin/ptxas", "usr/include/cuda.h"]
    parts += ["usr/lib/x86_64-linux-gnu/libcudart.so", "cccl/nvidia/cuda_cccl/include/cub/cub.cuh"]
    for name in parts:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    cuda12.lay_out(tmp_path, cccl, home)
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    programs = {"bin/crt/link.stub", "bin/nvcc", "bin/nvcc.profile", "bin/ptxas", "nvvm/bin/cicc"}
    others = {"nvvm/libdevice/libdevice.10.bc", "include/cuda.h", "include/cub/cub.cuh", "lib64/libcudart.so"}
    assert found == programs | others
    assert (home / "bin/nvcc").read_text() == f"{own}/bin/nvcc", "not the script that starts it"
    assert "NVVMIR_LIBRARY_DIR = $(_HERE_)/../nvvm/libdevice" in (home / "bin/nvcc.profile").read_text()
