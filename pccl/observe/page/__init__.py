"""The page: a run in a browser, served by the process of its master.

It needs the extra ``pccl[page]`` (Starlette and Uvicorn), which only ``app`` and ``server`` import.

* ``picture``: what the page shows of a status, as JSON. Pure.
* ``feed``: asks for the status twice a second, and tells all browsers.
* ``access``: who may see the page.
* ``app``: the routes, and the headers of every answer.
* ``server``: serves them in a thread of its own, with bounds.
* ``page.html``, ``page.css``, ``page.js``: the page itself, written by hand.
"""
