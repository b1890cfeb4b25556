"""Values that ``types`` builds on.

* ``tags``: tags of operations, also of those of some members only.
* ``mesh_plan``: how the members of a view divide a mesh.
"""
