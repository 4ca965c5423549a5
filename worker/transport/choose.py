"""Which transport a node uses. Its peers must use the same one: a read from another kind fails.

Mooncake is for RDMA: over TCP it moves about half as much a second as our own transport (`bench/fetch.py`).
"""

from __future__ import annotations

from pathlib import Path

from shared.log import get_logger
from worker.kv.arena import Arena
from worker.transport.base import Transport, TransportMissing
from worker.transport.mooncake import MooncakeTransport
from worker.transport.tcp import TcpTransport

NAMES = ("auto", "tcp", "mooncake")
RDMA_DEVICES = Path("/sys/class/infiniband")
log = get_logger("worker")


async def make_transport(
    name: str,
    arena: Arena,
    host: str,
    *,
    port: int = 0,
    protocol: str = "auto",
    devices: str = "",
    interface: str = "",
) -> Transport:
    """A started transport. `auto` is Mooncake where there are RDMA devices and it can be used, else TCP.

    `port` is TCP's; `protocol` ("auto": RDMA where there are devices; "tcp"; "rdma") and `devices` are Mooncake's;
    `interface`, the address to bind to, is both's. Raises TransportMissing and OSError for the one asked for by
    name, ValueError for another name.
    """
    if name not in NAMES:
        raise ValueError(f"a transport is one of {', '.join(NAMES)}, not {name!r}")
    why = "asked for"
    rdma = rdma_devices()
    wanted = [device for device in devices.split(",") if device]
    if missing := [device for device in wanted if device not in rdma]:
        raise TransportMissing(
            f"there is no RDMA device {', '.join(missing)} here, only {', '.join(rdma) or 'none at all'}"
        )
    if protocol == "rdma" and not rdma:
        raise TransportMissing("there are no RDMA devices here; without them Mooncake's protocol is tcp")
    if name == "tcp" and (protocol == "rdma" or wanted):
        raise TransportMissing("plain TCP does not use RDMA; the transport for that is mooncake")
    if protocol == "auto":
        protocol = "rdma" if rdma else "tcp"
    if name == "auto" and not rdma:
        why = "there are no RDMA devices"
    elif name != "tcp":
        mooncake = MooncakeTransport(protocol=protocol, devices=devices, interface=interface)
        try:
            await mooncake.start(arena, host)
        except (TransportMissing, OSError) as error:
            if name == "mooncake":
                raise
            why = str(error)
        else:
            why = "there are RDMA devices" if name == "auto" else why
            log.info("transport", name=mooncake.name, protocol=protocol, why=why)
            return mooncake
    tcp = TcpTransport(port=port, bind=interface)
    await tcp.start(arena, host)
    log.info("transport", name=tcp.name, why=why)
    return tcp


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices."""
    try:
        return sorted(entry.name for entry in RDMA_DEVICES.iterdir())
    except OSError:
        return []
