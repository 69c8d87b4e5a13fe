"""Codecs that send gradients in fewer bytes, for slow links.

A user chooses the format with a `Wire`; `encode_gradient` and `decode_gradient`
implement all formats.
"""

from ._formats import BFLOAT16 as BFLOAT16
from ._formats import GRADIENT_BLOCK as GRADIENT_BLOCK
from ._formats import ROW_BLOCK as ROW_BLOCK
from ._formats import Wire as Wire
from ._formats import arrays_of as arrays_of
from ._formats import decode_gradient as decode_gradient
from ._formats import encode_gradient as encode_gradient
from ._formats import wire_format as wire_format
