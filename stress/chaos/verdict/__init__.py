"""What was heard of a run, and what is wrong with it.

* ``record``: everything that was heard in a run, in order. Whether it was well is said by
  ``judge``.
* ``judge``: what is wrong with a run, and the report on it.
* ``plots``: the pictures of a run, drawn by matplotlib as SVG, which a page can hold.
* ``report``: the report on a run: a JSON file, a page with pictures, and a few lines.
"""
