"""How nodes talk: gRPC services and clients, certificates, discovery."""

from paceline import TLS_13_ONLY

if not TLS_13_ONLY:
    raise ImportError("grpc was imported before paceline, so its ports would take TLS 1.2: import paceline first")
