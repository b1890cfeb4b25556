"""The record of a run, its judgement, and the report on it.

* ``record``: everything that the harness received from the processes of a run.
* ``judge``: judges a run: finds what is wrong, and makes the report.
* ``plots``: plots of a run, drawn by matplotlib as SVG for a page.
* ``report``: writes the report: a JSON file, a page with plots, and a few lines.
"""
