"""The upload limit: all connections to other machines together send at most so many bytes a second.

* ``pacer``: decides how many bytes each connection may send now.
* ``transport``: a transport whose connections ask the pacer before they send.
"""
