"""Network transport: channels, mTLS, joining, one gRPC server for each node, tensor streams, mDNS. Other packages define what is sent."""
