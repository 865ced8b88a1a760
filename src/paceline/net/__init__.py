"""Sockets: channels, mTLS, joining, one gRPC server a node, tensor streams, mDNS. What is sent over them is told by others."""
