"""How nodes talk: gRPC services and clients, certificates, discovery."""
