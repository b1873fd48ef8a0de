"""What YOLOv5 and Ultralytics have in common: names are replaced, remembered and put back.

* ``engine``: the loaded modules, what is replaced in them and how it is put back, ``patch()``, ``unpatch()`` and the command lines;
* ``evidence``: is stock's code what we know?
* ``doctor``: which switches apply here, and why others do not;
* ``shapes``: what we touch of the hosts' objects;
* ``shared``: what takes the place of stock's code in both hosts.
"""
