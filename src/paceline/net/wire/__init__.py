"""Messages and services as protoc generates them."""
