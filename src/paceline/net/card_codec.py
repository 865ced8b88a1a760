"""A card as fleet.proto's NodeCapability, and back.

What comes from a peer is read leniently where a later version may say more (an unknown role is left out) and strictly where a reader
relies on it: bytes that are no card raise `MalformedMessage`.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from paceline.core.errors import MalformedMessage
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import Device, Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.net.wire import fleet_pb2 as wire

_TO_WIRE = {
    Role.VERIFIER: wire.CAPABILITY_ROLE_VERIFIER,
    Role.PROPOSER: wire.CAPABILITY_ROLE_PROPOSER,
    Role.EMBEDDER: wire.CAPABILITY_ROLE_EMBEDDER,
    Role.TOOL: wire.CAPABILITY_ROLE_TOOL,
    Role.SHARD: wire.CAPABILITY_ROLE_SHARD,
    Role.PREFILL: wire.CAPABILITY_ROLE_PREFILL,
}
_FROM_WIRE = {number: role for role, number in _TO_WIRE.items()}


def write_card(card: NodeCard) -> bytes:
    """The bytes a node signs."""
    message = wire.NodeCapability(
        node_id=card.node_id,
        grpc_addresses=card.addresses,
        ring_address=card.ring_address,
        platform=card.platform,
        memory_total_bytes=card.memory_total_bytes,
        memory_free_bytes=card.memory_free_bytes,
        memory_bandwidth_bytes_per_second=card.memory_bytes_per_s,
        mlx_version=card.mlx_version,
        backend=card.backend,
        device=card.device,
        models=[_write_offer(offer) for offer in card.models],
        version=card.version,
        announced_at_unix=card.announced_at,
        ttl_seconds=card.ttl_s,
        instance_nonce=card.instance,
        leaving=card.leaving,
        software_version=card.software,
        links=[
            wire.Link(to_node_id=link.to, address=link.address, rtt_seconds=link.rtt_s, bytes_per_second=link.bytes_per_s)
            for link in card.links
        ],
        stamp_anchor=card.stamp_anchor,
        serves_shards=card.serves_shards,
        shard_memory_bytes=card.shard_memory_bytes,
        devices=[
            wire.Device(
                backend=device.backend,
                device=device.name,
                memory_total_bytes=device.memory_total_bytes,
                memory_free_bytes=device.memory_free_bytes,
                memory_bandwidth_bytes_per_second=device.memory_bytes_per_s,
                shard_memory_bytes=device.shard_memory_bytes,
                weights=device.weights,
            )
            for device in card.devices
        ],
    )
    return message.SerializeToString(deterministic=True)


def read_card(data: bytes) -> NodeCard:
    """The card in bytes that a node signed.

    Raises:
        MalformedMessage: they are no card.
    """
    try:
        message = wire.NodeCapability.FromString(data)
    except DecodeError as error:
        raise MalformedMessage("A card's bytes are not a NodeCapability") from error
    # Fields that a later version added stay where they are: a fleet is updated one machine at a time.
    if message.SerializeToString(deterministic=True) != data:
        raise MalformedMessage("A card is not written as any version writes it")
    if not message.node_id or not message.version:
        raise MalformedMessage("A card names no node or has no version")
    return NodeCard(
        node_id=NodeId(message.node_id),
        version=message.version,
        addresses=tuple(message.grpc_addresses),
        instance=message.instance_nonce,
        ttl_s=message.ttl_seconds,
        announced_at=message.announced_at_unix,
        platform=message.platform,
        backend=message.backend,
        device=message.device,
        memory_total_bytes=message.memory_total_bytes,
        memory_free_bytes=message.memory_free_bytes,
        memory_bytes_per_s=message.memory_bandwidth_bytes_per_second,
        models=tuple(_read_offer(offer, _FROM_WIRE[offer.role]) for offer in message.models if offer.role in _FROM_WIRE),
        links=tuple(Link(NodeId(link.to_node_id), link.address, link.rtt_seconds, link.bytes_per_second) for link in message.links),
        ring_address=message.ring_address,
        mlx_version=message.mlx_version,
        software=message.software_version,
        leaving=message.leaving,
        stamp_anchor=message.stamp_anchor,
        serves_shards=message.serves_shards,
        shard_memory_bytes=message.shard_memory_bytes,
        devices=tuple(
            Device(
                told.backend,
                told.device,
                told.memory_total_bytes,
                told.memory_free_bytes,
                told.memory_bandwidth_bytes_per_second,
                told.shard_memory_bytes,
                tuple(told.weights),
            )
            for told in message.devices
        ),
    )


def _write_offer(offer: ModelOffer) -> wire.ModelCapability:
    shape = offer.shape
    return wire.ModelCapability(
        model_id=offer.model_id,
        role=_TO_WIRE[offer.role],
        quantization=offer.weights,
        tokens_per_second=offer.tokens_per_second,
        prefill_tokens_per_second=offer.prefill_tokens_per_second,
        digest=offer.digest,
        warm=offer.warm,
        numerics_id=offer.numerics_id,
        holds_identity=offer.holds_identity,
        size_bytes=offer.size_bytes,
        vocabulary=offer.vocabulary,
        tokenizer_sha256=offer.tokenizer,
        under_way=offer.under_way,
        files_sha256=offer.files,
        shape=None
        if shape is None
        else wire.ModelShape(
            n_layers=shape.n_layers,
            hidden=shape.hidden,
            layer_bytes=shape.layer_bytes,
            edge_bytes=shape.edge_bytes,
            kv_bytes_per_token_per_layer=shape.kv_bytes_per_token_per_layer,
            max_context=shape.max_context,
            row_bytes=shape.row_bytes,
        ),
        shard=None if offer.shard is None else _write_shard(offer.shard),
    )


def _write_shard(shard: ShardState) -> wire.ShardCapability:
    return wire.ShardCapability(
        first_layer=shard.layers.start,
        stop_layer=shard.layers.stop,
        max_concurrent_streams=shard.max_streams,
        streams_in_use=shard.streams,
        queue_depth=shard.queue_depth,
        memory_bytes=shard.memory_bytes,
        loaded_percent=shard.loaded_percent,
    )


def _read_offer(offer: wire.ModelCapability, role: Role) -> ModelOffer:
    shape = offer.shape
    return ModelOffer(
        model_id=offer.model_id,
        role=role,
        weights=offer.quantization,
        tokens_per_second=offer.tokens_per_second,
        prefill_tokens_per_second=offer.prefill_tokens_per_second,
        digest=offer.digest,
        warm=offer.warm,
        numerics_id=offer.numerics_id,
        holds_identity=offer.holds_identity,
        size_bytes=offer.size_bytes,
        shape=ModelShape(
            shape.n_layers,
            shape.hidden,
            shape.layer_bytes,
            shape.edge_bytes,
            shape.kv_bytes_per_token_per_layer,
            shape.max_context,
            shape.row_bytes,
        )
        if offer.HasField("shape")
        else None,
        vocabulary=offer.vocabulary,
        tokenizer=offer.tokenizer_sha256,
        under_way=offer.under_way,
        files=offer.files_sha256,
        shard=_read_shard(offer.shard) if offer.HasField("shard") else None,
    )


def _read_shard(shard: wire.ShardCapability) -> ShardState:
    layers = LayerRange(shard.first_layer, shard.stop_layer)
    return ShardState(
        layers, shard.max_concurrent_streams, shard.streams_in_use, shard.queue_depth, shard.memory_bytes, shard.loaded_percent
    )
