"""Train a real detector on real images with the real train.py of YOLOv5, stock and through torch_fastdet: `make demo`.

dataset.py   makes the images: handwritten digits on photographs, the same bytes from the same seed
training.py  runs train.py and detect.py as subprocesses, and times them from outside
report.py    compares the two runs: table, curves, images, results.json
"""
