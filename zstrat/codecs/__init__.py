"""Gradients in fewer bytes, for slow links: formats, and what is left over of them.

`Wire` is what a user asks for; `encode` and `decode` are the formats; `Residuals` keep
what biased formats have not sent yet.
"""

from ._encoding import EncodedGradient as EncodedGradient
from ._encoding import encode as encode
from ._formats import BLOCK as BLOCK
from ._formats import ROW_BLOCK as ROW_BLOCK
from ._formats import arrays_of as arrays_of
from ._formats import decode as decode
from ._residuals import Lent as Lent
from ._residuals import Residuals as Residuals
from ._wire_format import Wire as Wire
from ._wire_format import wire_format as wire_format
