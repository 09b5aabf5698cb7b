"""From a config to a connector: who this engine is for its peers, what moves its pages, and both scheduler halves."""

import dataclasses
import logging
import secrets
import socket

from compiled.step import KVMemory, KVSpec, ModelSpec
from streamengine.config import EngineConfig, TransferConfig, is_loopback
from streamengine.errors import StartupError
from streamengine.landing import Landing
from streamengine.transfer.choose import Threshold
from streamengine.transfer.connection import listen
from streamengine.transfer.connector import Connector
from streamengine.transfer.decode import Decode
from streamengine.transfer.identity import identify
from streamengine.transfer.in_process import InProcess
from streamengine.transfer.prefill import Checksums, Prefills
from streamengine.transfer.shared_memory import SharedMemory
from streamengine.transfer.transport import Transport, TransportError, checksums
from streamengine.transfer.values import Card, Fingerprint
from streamengine.transfer.worker import Worker

SHARE, PREFILL_SHARE = 4, 2
"""One part in so many of the pool is for transfers in one direction; half where prompts for others are all there is."""


_logger = logging.getLogger(__name__)


def reserve(config: TransferConfig, kv: KVSpec) -> KVSpec:
    """``kv`` with the pages that transfers may hold set apart."""
    return dataclasses.replace(kv, reserved=sum(_rooms(config, kv)))


def _rooms(config: TransferConfig, kv: KVSpec) -> tuple[int, int]:
    """Pages for transfers to this engine, and for prompts of others."""
    pages = kv.pages - 1
    kept = pages // (PREFILL_SHARE if config.role == "prefill" else SHARE)
    return pages // SHARE if config.peers else 0, kept if config.listen else 0


def open_listener(config: TransferConfig | None) -> socket.socket | None:
    """Where other engines will connect to, before anything is loaded: they wait until `open_worker` takes them in.

    Raises:
        StartupError: that address cannot be had.
    """
    if config is None or config.listen is None:
        return None
    host, _, _ = config.listen.rpartition(":")
    if config.peer_key is None and not (host == "unix" or is_loopback(host.strip("[]"))):
        _logger.warning("anybody who reaches %s may have prompts computed and read the KV cache: no peer_key", host)
    try:
        return listen(config.listen)
    except OSError as error:
        raise StartupError(error.strerror or str(error), param="listen") from error
    except ValueError as error:
        raise StartupError(str(error), param="listen") from error


def open_worker(
    config: TransferConfig, listener: socket.socket | None, model: ModelSpec, kv: KVSpec, memory: KVMemory | None
) -> tuple[Card, Worker, Checksums]:
    """Take in those who come to ``listener``, and connect. The card has no address: the worker's has.

    Raises:
        StartupError: this KV cache cannot be moved so.
    """
    if memory is None:
        raise StartupError(f"the KV cache of this device cannot be moved by {config.kv_transport}", param="device")
    try:
        transport = _transport(config)
    except TransportError as error:
        raise _cannot(error) from error
    try:
        fingerprint = Fingerprint(
            model=identify(model.folder),
            compute=model.dtype,
            dtype=kv.dtype,
            page_size=kv.page_size,
            page_bytes=kv.page_bytes,
            layers=kv.layers,
            layout=kv.layout,
            window=kv.window,
            transport=transport.name,
            transport_version=transport.version,
        )
        incarnation = secrets.token_hex(8)
        card = Card(engine=config.name or incarnation, incarnation=incarnation, fingerprint=fingerprint)
        worker = Worker(card, memory, transport, listener=listener, peers=config.peers, key=config.peer_key)
    except (OSError, ValueError, TransportError) as error:
        transport.close()
        raise _cannot(error) from error
    return card, worker, lambda pages: checksums(memory, pages)


def _cannot(error: Exception) -> StartupError:
    return StartupError(f"pages cannot be moved between engines: {error}", param="transfer")


def build_connector(
    config: EngineConfig, model: ModelSpec, kv: KVSpec, opened: tuple[Card, Worker, Checksums], landing: Landing
) -> Connector:
    """What the core has of its worker, for both directions that ``config`` names."""
    card, worker, sums = opened
    transfer = config.transfer
    assert transfer is not None
    decode = prefills = None
    landing_room, kept_room = _rooms(transfer, kv)
    if transfer.peers:
        decode = Decode(
            landing,
            Threshold(transfer.prefill_threshold, kv.page_bytes, kv.page_size),
            room=landing_room,
            name=f"{card.engine}/{card.incarnation}",
            page_size=kv.page_size,
            page_bytes=kv.page_bytes,
            lease_s=transfer.lease_s,
            deadline_s=transfer.transfer_deadline_s,
            on_failure="recompute" if transfer.recomputes else "fail",
        )
    if transfer.listen:
        prefills = Prefills(
            landing,
            engine=card.engine,
            incarnation=card.incarnation,
            page_size=kv.page_size,
            room=kept_room,
            most=config.max_num_seqs + config.max_queue,
            vocab_size=model.vocab_size,
            checksums=sums if config.debug else None,
        )
    return Connector(worker, landing, decode, prefills)


def _transport(config: TransferConfig) -> Transport:
    if config.kv_transport == "nixl":
        # An optional dependency, and slow to load.
        from streamengine.transfer.nixl import Nixl

        return Nixl()
    return InProcess() if config.kv_transport == "in_process" else SharedMemory()
