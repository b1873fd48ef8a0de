"""The switch of this name: what it replaces in YOLOv5 and in Ultralytics, by which evidence, and by what."""
