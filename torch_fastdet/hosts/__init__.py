"""What YOLOv5 and Ultralytics have in common: names are replaced, remembered and put back.

* ``engine``: the loaded modules, what is replaced in them and how it is put back, ``patch()``, ``unpatch()`` and the command lines;
* ``formula``, ``trials``: do stock's method and ours compute the same?
* ``shared``: what takes the place of stock's code in both hosts.
"""
