"""Wire formats: they encode values as fewer bytes, block by block, and decode them.

* ``blocks``: a segment as blocks of values: extremes per block, and a number per block for each
  value.
* ``steps``: the step of a block in the upper half of a float's bits: 16 for float32, 32 for
  float64.
* ``constants``: blocks of one repeated number, in formats whose metadata has no room for that
  number.
* ``noise``: the random numbers of stochastic rounding, which any member can draw again.
* ``packing``: several short codes in a byte.
* ``codec``: the base class of all wire formats: encodes a segment, decodes it, and measures the
  error.
* ``affine``: even steps from each block's minimum to its maximum: uint8, uint16, int4 and int2.
* ``symmetric``: steps about zero, up to each block's largest magnitude: int8 and companded8.
* ``octaves``: powers of two below each block's largest magnitude: e3m0.
* ``halves``: float16 and bfloat16, scaled by a power of two per block.
* ``sparse``: the largest values of each block.

Encoding may differ in the last bit between machines. Decoding does not. It uses multiplications and
additions, one by one, that IEEE 754 defines exactly, and each product of a code and a step is
exact. So all members that decode the same bytes hold the same bits.

A new format needs a member of ``WireFormat`` and of ``_WIRE`` in ``protocol/types.py``, a ``Codec``
in ``_CODECS`` below, and in that codec its case (such as a row of ``symmetric._SCALES``). Its name
belongs in ``QuantizationOptions`` (``descriptors``) and ``docs/api.md``, its error in
``HALF_STEPS`` (``cli/bench/values.py``) and ``docs/algorithms.md``, and an example of it in
``tests/unit/cli/bench/test_values.py``.
"""

from __future__ import annotations

from pccl.collectives.quantization.affine import AffineCodec
from pccl.collectives.quantization.codec import Codec, EncodeError
from pccl.collectives.quantization.halves import HalfCodec
from pccl.collectives.quantization.noise import Noise, noise_source
from pccl.collectives.quantization.octaves import OctaveCodec
from pccl.collectives.quantization.sparse import SparseCodec
from pccl.collectives.quantization.symmetric import SymmetricCodec
from pccl.collectives.reductions import Scratch
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Quantization, WireFormat

__all__ = ["Codec", "EncodeError", "Noise", "make_codec", "noise_source"]

_CODECS: dict[WireFormat, type[Codec]] = {
    WireFormat.UINT8: AffineCodec,
    WireFormat.UINT16: AffineCodec,
    WireFormat.INT4: AffineCodec,
    WireFormat.INT8: SymmetricCodec,
    WireFormat.COMPANDED8: SymmetricCodec,
    WireFormat.FLOAT16: HalfCodec,
    WireFormat.BFLOAT16: HalfCodec,
    WireFormat.E3M0: OctaveCodec,
    WireFormat.INT2: AffineCodec,
    WireFormat.SPARSE: SparseCodec,
}


def make_codec(quantization: Quantization, data_type: DataType, scratch: Scratch) -> Codec:
    """Make the codec for the segments of one operation.

    Args:
        quantization: a format other than NONE, with its block.
        data_type: type of the values; a float.
        scratch: working memory; may be shared by all codecs of a thread.
    """
    return _CODECS[quantization.format](quantization, data_type, scratch)
