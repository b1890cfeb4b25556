"""The model of a replica: its own parameters, and the outer ones that all members share.

* ``outer``: the outer parameters: a float32 copy on the host, bit-identical on all members.
* ``averaging``: averages in which directions and lengths are averaged apart.
* ``outer_optimizers``: the usual outer optimizer, clipping, and schedules of its rate.
* ``buffers``: what a model keeps beside its parameters, such as running statistics.
* ``inner_state``: what the inner optimizer keeps, such as moments, for peers that join late.
* ``local_model``: the local model, and its distance from the outer parameters.
"""
