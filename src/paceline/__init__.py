"""Paceline: one OpenAI endpoint out of the machines you already own.

For programs of others there are two names, imported when they are asked for: `DistributedSpeculativeDecoder` decodes one text at a time here with drafts of
the node that a plan names, and `RemoteProposer` asks another node's proposer for blocks as if it were here.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.ways.draft.connection import RemoteProposer
    from paceline.ways.draft.decoder import DistributedSpeculativeDecoder

__version__ = "0.1.0"
__all__ = ["DistributedSpeculativeDecoder", "RemoteProposer", "__version__"]

# gRPC has no switch for TLS 1.3 alone, and reads this when it is imported: of TLS 1.2 it leaves one suite, for RSA keys, which no
# certificate here has; the suites of 1.3 are not chosen by it.
_SUITES, _NONE_OF_OURS = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"
TLS_13_ONLY = "grpc" not in sys.modules or os.environ.get(_SUITES) == _NONE_OF_OURS
os.environ[_SUITES] = _NONE_OF_OURS


def __getattr__(name: str) -> Any:
    match name:
        case "DistributedSpeculativeDecoder":
            from paceline.ways.draft.decoder import DistributedSpeculativeDecoder

            return DistributedSpeculativeDecoder
        case "RemoteProposer":
            from paceline.ways.draft.connection import RemoteProposer

            return RemoteProposer
        case _:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
