"""One engine for all hosts (YOLOv5, Ultralytics): replace names of a third party, remember them, and put them back.

* ``import_hook``: the loaded modules, and a callback after each further import;
* ``engine``: what is replaced, and how it is put back;
* ``signature``: do stock's function and ours take the same parameters?
* ``formula``: do stock's method and ours compute the same?
* ``switch``: what a switch is; each lives in a file of its host, ``<host>/switches/<switch>.py``;
* ``stand_in``: a class that takes the place of one from which people derive;
* ``host``: ``patch()`` and ``unpatch()`` over a registry of switches;
* ``launcher``: the same by flags on a command line.
"""
