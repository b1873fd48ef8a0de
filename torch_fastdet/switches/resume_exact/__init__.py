"""``resume_exact``: a training that was stopped and resumed ends with the bits of one that was not.

Checkpoints of the hosts lose state: weights and momentum in half precision, random states, the position in an accumulation.
A file beside the checkpoint holds all of it (:mod:`.files`): what a training is (:mod:`.state`), and where its loader is
(:mod:`.position`). ``yolov5.py`` and ``ultralytics.py`` say when it is written and read. docs/reliability.md says
what is promised.
"""
