"""Golden stage tensors: save what each stage of a detector's post-processing produced, and find the first that differs.

A port of post-processing to another language or runtime often gives wrong boxes, and no hint where they went wrong. Save the
same named stages on both sides, here and in C++ (``torch_fastdet/golden.h`` writes and reads the same files), and
compare::

    from torch_fastdet import golden

    stages = golden.yolov5_stages(heads, anchors, strides)     # raw.0, raw.1, ..., decoded, candidates, sorted, kept
    golden.save("reference", stages)
    print(golden.compare("reference", "port"))                 # or: python -m torch_fastdet.golden compare reference port

A folder holds one ``NN_stage.npy`` for each stage (the tensor's elements in row-major order, for ``numpy.load``) and
``stages.tsv``: a line for each stage, in the order of the pipeline, with name, dtype, shape, stride and file.
"""

from torch_fastdet.golden.comparison import Comparison, Row, compare
from torch_fastdet.golden.files import Stage, Writer, load, save
from torch_fastdet.golden.reference import yolov5_stages

__all__ = ["Comparison", "Row", "Stage", "Writer", "compare", "load", "save", "yolov5_stages"]
