"""Paceline: one OpenAI endpoint out of the machines you already own."""

import os
import sys

__version__ = "0.1.0"

# gRPC has no switch for TLS 1.3 alone, and reads this when it is imported: of TLS 1.2 it leaves one suite, for RSA keys, which no
# certificate here has; the suites of 1.3 are not chosen by it.
_SUITES, _NONE_OF_OURS = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"
TLS_13_ONLY = "grpc" not in sys.modules or os.environ.get(_SUITES) == _NONE_OF_OURS
os.environ[_SUITES] = _NONE_OF_OURS
