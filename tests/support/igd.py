"""A router with UPnP on this machine: it answers searches, describes itself, and maps ports."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"

DEVICE = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
 <specVersion><major>1</major><minor>0</minor></specVersion>
 <device>
  <deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
  <friendlyName>Box</friendlyName><manufacturer>Any</manufacturer><modelName>Box</modelName>
  <UDN>uuid:00000000-0000-0000-0000-000000000001</UDN>
  <deviceList><device>
   <deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType>
   <friendlyName>WAN</friendlyName><manufacturer>Any</manufacturer><modelName>Box</modelName>
   <UDN>uuid:00000000-0000-0000-0000-000000000002</UDN>
   <deviceList><device>
    <deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>
    <friendlyName>Conn</friendlyName><manufacturer>Any</manufacturer><modelName>Box</modelName>
    <UDN>uuid:00000000-0000-0000-0000-000000000003</UDN>
    <serviceList><service>
     <serviceType>{service}</serviceType>
     <serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
     <SCPDURL>/scpd.xml</SCPDURL><controlURL>{control}</controlURL><eventSubURL>/ev</eventSubURL>
    </service></serviceList>
   </device></deviceList>
  </device></deviceList>
 </device>
</root>"""

_ARGUMENTS = {
    "NewRemoteHost": "string",
    "NewExternalPort": "ui2",
    "NewProtocol": "string",
    "NewInternalPort": "ui2",
    "NewInternalClient": "string",
    "NewEnabled": "boolean",
    "NewPortMappingDescription": "string",
    "NewLeaseDuration": "ui4",
}

_ACTIONS = {
    "AddPortMapping": list(_ARGUMENTS),
    "DeletePortMapping": list(_ARGUMENTS)[:3],
    "GetExternalIPAddress": [],
}


def _scpd() -> str:
    actions: list[str] = []
    for name, arguments in _ACTIONS.items():
        told = [(one, "in", one[3:]) for one in arguments]
        if name == "GetExternalIPAddress":
            told = [("NewExternalIPAddress", "out", "ExternalIPAddress")]
        texts = [
            f"<argument><name>{one}</name><direction>{way}</direction>"
            f"<relatedStateVariable>{variable}</relatedStateVariable></argument>"
            for one, way, variable in told
        ]
        arguments_text = "".join(texts)
        actions.append(
            f"<action><name>{name}</name><argumentList>{arguments_text}</argumentList></action>"
        )
    kinds = {**{name[3:]: kind for name, kind in _ARGUMENTS.items()}, "ExternalIPAddress": "string"}
    variables = [
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType>'
        "</stateVariable>"
        for name, kind in kinds.items()
    ]
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0">'
        "<specVersion><major>1</major><minor>0</minor></specVersion>"
        f"<actionList>{''.join(actions)}</actionList>"
        f"<serviceStateTable>{''.join(variables)}</serviceStateTable></scpd>"
    )


@dataclass
class UpnpBox:
    """A router with UPnP.

    Attributes:
        host: its own address on the other side.
        error: the code of its refusals; 0: it refuses nothing.
        service: what it offers.
        control: where its service is.
        location: where it says that its description is, if not empty.
        padding: spaces after its description.
        redirects: whether it sends requests for its description elsewhere.
        speaks: whether it answers searches.
        ports: port of the router -> (own host, own port, lifetime in seconds).
        paths: paths of all requests.
    """

    host: str = "8.8.4.4"
    error: int = 0
    service: str = SERVICE
    control: str = "/control"
    location: str = ""
    padding: int = 0
    redirects: bool = False
    speaks: bool = True
    ports: dict[int, tuple[str, int, int]] = field(default_factory=dict[int, tuple[str, int, int]])
    paths: list[str] = field(default_factory=list[str])
    http_port: int = 0

    def search_answer(self) -> bytes:
        """What it answers to a search."""
        location = self.location or f"http://127.0.0.1:{self.http_port}/device.xml"
        return (
            "HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nEXT:\r\n"
            f"LOCATION: {location}\r\nSERVER: any\r\n"
            "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
            "USN: uuid:00000000-0000-0000-0000-000000000001::x\r\n\r\n"
        ).encode()

    def answer(self, path: str, body: str) -> tuple[str, str]:
        """What it answers to a request: the status line, and the body."""
        self.paths.append(path)
        if path == "/device.xml":
            if self.redirects:
                return "302 Found\r\nLocation: /elsewhere.xml", ""
            text = DEVICE.format(service=self.service, control=self.control)
            return "200 OK", text + " " * self.padding
        if path == "/scpd.xml":
            return "200 OK", _scpd()
        found = re.search(r"<(?:\w+:)?(\w+PortMapping|GetExternalIPAddress)\b", body)
        if path != "/control" or found is None:
            return "404 Not Found", ""
        return self._act(found[1], dict(re.findall(r"<(New\w+)>([^<]*)</", body)))

    def _act(self, action: str, values: dict[str, str]) -> tuple[str, str]:
        out = ""
        if action == "GetExternalIPAddress":
            out = f"<NewExternalIPAddress>{self.host}</NewExternalIPAddress>"
        elif self.error:
            return "500 Internal Server Error", _envelope(
                "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring>"
                '<detail><UPnPError xmlns="urn:schemas-upnp-org:control-1-0">'
                f"<errorCode>{self.error}</errorCode><errorDescription>Words</errorDescription>"
                "</UPnPError></detail></s:Fault>"
            )
        else:
            assert values["NewProtocol"] == "TCP"
            outer = int(values["NewExternalPort"])
            if action == "AddPortMapping":
                assert values["NewEnabled"] == "1"
                own = int(values["NewInternalPort"])
                lifetime_s = int(values["NewLeaseDuration"])
                self.ports[outer] = values["NewInternalClient"], own, lifetime_s
            else:
                self.ports.pop(outer, None)
        return "200 OK", _envelope(
            f'<u:{action}Response xmlns:u="{self.service}">{out}</u:{action}Response>'
        )

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[int]:
        """Answer at ports of this machine; yield that for searches."""
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.http_port = server.sockets[0].getsockname()[1]
        box = self

        class Searched(asyncio.DatagramProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self._transport = cast(asyncio.DatagramTransport, transport)

            def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
                if box.speaks and data.startswith(b"M-SEARCH"):
                    self._transport.sendto(box.search_answer(), addr)

        transport, _ = await loop.create_datagram_endpoint(Searched, local_addr=("127.0.0.1", 0))
        try:
            yield transport.get_extra_info("sockname")[1]
        finally:
            transport.close()
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"(?i)content-length: *(\d+)", head)
        body = (await reader.readexactly(int(length[1]))).decode() if length else ""
        status, text = self.answer(head.split()[1], body)
        data = text.encode()
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: text/xml\r\nContent-Length: {len(data)}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        writer.write(data)
        writer.close()
        await writer.wait_closed()


def _envelope(body: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f"<s:Body>{body}</s:Body></s:Envelope>"
    )
