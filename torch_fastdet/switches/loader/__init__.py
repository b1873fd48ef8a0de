"""Holds what ``loader_optim`` replaces in YOLOv5 and in Ultralytics, by which evidence, and by what."""
