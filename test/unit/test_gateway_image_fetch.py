"""No URL of a client makes the server call where it must not (SSRF), wait long, or take much."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpcore", reason="httpcore is not installed: pip install 'vla-runtime[gateway]'")
from vla_cloud.core.address_rules import AddressRefused, check_url, refusal_of
from vla_cloud.gateway.image_fetch import FetchError, ImageFetcher
from vla_cloud.gateway.image_settings import FetchRules
from vla_common.clock import SystemClock

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 2000
HOST = "images.example.org"


@pytest.mark.parametrize("address", [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "169.254.0.1", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1",
    "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.255", "240.0.0.1",
    "255.255.255.255", "168.63.129.16",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "100::1", "2001:db8::1", "3fff::1",
    "2002:7f00:1::", "2002:a00:1::1", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:10::1", "2001:2::1",
    "64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "2620:4f:8000::1", "5f00::1",
    "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:7f00:1", "4000::1", "localhost", "", "1.2.3", "2130706433", "2606:4700::1%lo",
])  # fmt: skip
def test_addresses_that_are_never_called(address: str) -> None:
    assert refusal_of(address) is not None


@pytest.mark.parametrize("address", [
    "8.8.8.8", "1.1.1.1", "100.63.255.255", "172.32.0.1", "11.0.0.1", "192.0.1.1", "223.255.255.255", "2606:4700::1111",
    "2a00:1450:4001::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2606:4700::5efe:808:808", "2003::1",
])  # fmt: skip
def test_public_addresses_are_called(address: str) -> None:
    assert refusal_of(address) is None


def test_networks_may_be_allowed_one_by_one() -> None:
    allowed = [ip_network("10.1.0.0/16"), ip_network("fd00::/8")]
    assert refusal_of("10.1.2.3", allowed) is None is refusal_of("fd12::1", allowed) is refusal_of("::ffff:10.1.2.3", allowed)
    assert refusal_of("10.2.0.1", allowed) and refusal_of("127.0.0.1", allowed) and refusal_of("fe80::1", allowed)


@given(st.ip_addresses(v=4))
def test_every_spelling_of_an_ipv4_address_is_judged_alike(address) -> None:
    told = refusal_of(str(address))
    for text in (f"::ffff:{address}", f"64:ff9b::{address}", f"2606:4700::5efe:{address}"):
        assert refusal_of(text) == told
    assert told is not None or address.is_global  # ours refuses at least what the standard library does


ALLOW = (HOST, "*.cdn.example.org", "alt.example.org:8443")


@pytest.mark.parametrize("url", [
    "http://images.example.org/x.png", "ftp://images.example.org/x.png", "file:///etc/passwd", "gopher://images.example.org/",
    "data:image/png;base64,AAAA", "javascript:alert(1)", "images.example.org/x.png", "//images.example.org/x.png", "https:", "https://",
    "https:///x.png", "https://example.org/", "https://images.example.org.evil.net/", "https://evilimages.example.org/",
    "https://images.example.org@evil.net/", "https://evil.net#@images.example.org/", "https://evil.net?@images.example.org/",
    "https://user:pw@images.example.org/", "https://images.example.org:8443/", "https://images.example.org:22/",
    "https://images.example.org:99999/", "https://images.example.org:x/", "https://alt.example.org/", "https://alt.example.org:8444/",
    "https://cdn.example.org/", "https://xcdn.example.org/", "https://127.0.0.1/", "https://2130706433/", "https://0x7f000001/",
    "https://0177.0.0.1/", "https://0x7f.1/", "https://127.1/", "https://127.0.0.1./", "https://[::1]/", "https://[::ffff:127.0.0.1]/",
    "https://[fe80::1%25eth0]/", "https://169.254.169.254/latest/meta-data", "https://metadata.google.internal/", "https://localhost/",
    "https://images.example.org./", "https://images.example.org%00.evil.net/", "https://images.example.org\\@evil.net/",
    "https://images.example.org\t/", "https://images.example.org\r\nHost: evil/", "https:// images.example.org/", "https://ımages.example.org/",
    "https://images。example.org/", "https://%69mages.example.org/", "https://images.example.org/" + "x" * 2048, "https://-x.cdn.example.org/",
    "https://..cdn.example.org/", "", "https",
])  # fmt: skip
def test_urls_that_are_never_asked_for(url: str) -> None:
    with pytest.raises(AddressRefused):
        check_url(url, ALLOW, allow_http=False)


def test_urls_that_are_asked_for() -> None:
    for url, host, port, path in (
        ("https://images.example.org", HOST, 443, "/"), ("HTTPS://IMAGES.example.org:443/a/b.png?c=d&e#f", HOST, 443, "/a/b.png?c=d&e"),
        ("https://a.b.cdn.example.org/x", "a.b.cdn.example.org", 443, "/x"), ("https://alt.example.org:8443/", "alt.example.org", 8443, "/"),
    ):  # fmt: skip
        target = check_url(url, ALLOW, allow_http=False)
        assert (target.scheme, target.host, target.port, target.path) == ("https", host, port, path)
    assert check_url("http://images.example.org/", ALLOW, allow_http=True).port == 80


@pytest.mark.parametrize("host", ["127.0.0.1", "a b", "x/y", "https://x", "0x7f.1", "*", "*.*", "x:0", "x:port", "", "[::1]"])
def test_a_list_that_no_name_could_match_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="allow_hosts"):
        FetchRules(allow_hosts=(host,))


# With a real server


Respond = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """Answers by path; counts what came."""

    def __init__(self) -> None:
        self.paths: dict[str, Respond] = {}
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.asked.append((self.headers["host"], self.path))
                site.paths[self.path](self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:  # clients that have seen enough
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.ended = threading.Event()


@pytest.fixture
def site() -> Iterator[Site]:
    it = Site()
    thread = threading.Thread(target=it.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield it
    it.ended.set()
    it.server.shutdown()
    it.server.server_close()
    thread.join()


def send(body: bytes = PNG, status: int = 200, length: bool = True, **headers: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_type": "image/png", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        if length:
            handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return respond


def redirect(to: str, status: int = 302) -> Respond:
    return send(b"", status, location=to)


class Names:
    """A resolver; ``answers`` by name, one after the other (the last one stays)."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): list(rows) for name, rows in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        rows = self.answers.get(host)
        if rows is None:
            raise socket.gaierror(-2, "Name or service not known")
        return rows.pop(0) if len(rows) > 1 else rows[0]


def fetcher(site: Site, names: Names, **changes: object) -> ImageFetcher:
    rules = dict(
        allow_hosts=(f"a.test:{site.port}", f"b.test:{site.port}"), allow_http=True, allow_networks=("127.0.0.1/32",), timeout_s=60.0
    )
    return ImageFetcher(FetchRules(**{**rules, **changes}), SystemClock(), names, TLS)


TLS = ssl.create_default_context()  # one for all: to load the authorities takes time
LOCAL = [["127.0.0.1"]]


def test_an_image_is_fetched_by_name_from_the_address_that_was_checked(site: Site) -> None:
    site.paths["/x.png?v=1"] = send()
    names = Names(a_test=LOCAL)
    found = fetcher(site, names).fetch(f"http://a.test:{site.port}/x.png?v=1#here", 4096)
    assert (found.data, found.media_type) == (PNG, "image/png")
    assert site.asked == [(f"a.test:{site.port}", "/x.png?v=1")] and names.asked == ["a.test"]


def test_a_second_answer_of_the_resolver_does_not_count(site: Site) -> None:
    """DNS rebinding: checked and called is one and the same answer."""
    site.paths["/"] = send()
    names = Names(a_test=[["127.0.0.1"], ["10.0.0.1"]])
    it = fetcher(site, names)
    assert it.fetch(f"http://a.test:{site.port}/", 4096).data == PNG and names.asked == ["a.test"]
    with pytest.raises(FetchError, match="special address"):
        it.fetch(f"http://a.test:{site.port}/", 4096)
    assert len(site.asked) == 1


@pytest.mark.parametrize("answer", [
    ["127.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["fe80::1%lo"],
    ["64:ff9b::7f00:1"], ["2002:7f00:1::"], ["0.0.0.0"], [], ["nonsense"],
])  # fmt: skip
def test_one_special_address_among_a_names_is_enough_to_refuse_it(site: Site, answer: list[str]) -> None:
    with pytest.raises(FetchError, match="address") as caught:
        fetcher(site, Names(a_test=[answer]), allow_networks=()).fetch(f"http://a.test:{site.port}/", 4096)
    assert not site.asked and caught.value.is_refused
    assert not any(address in str(caught.value) for address in answer if address)  # strangers learn nothing of the network


def test_redirects_are_followed_with_the_same_checks(site: Site) -> None:
    names = Names(a_test=LOCAL, b_test=LOCAL)
    here = f"http://a.test:{site.port}"
    site.paths |= {
        "/1": redirect(f"http://b.test:{site.port}/2"), "/2": redirect("3", 307), "/3": send(), "/evil": redirect("http://evil.test/"),
        "/port": redirect("http://a.test:22/"), "/ip": redirect(f"http://127.0.0.1:{site.port}/3"), "/file": redirect("file:///etc/passwd"),
        "/data": redirect("data:image/png;base64,AAAA"), "/loop": redirect("/loop"), "/none": send(b"", 302), "/user": redirect(f"http://x@a.test:{site.port}/3"),
        "/meta": redirect("http://169.254.169.254/latest/"), "/relative": redirect("//evil.test/3"), "/gopher": redirect("gopher://a.test/"),
    }  # fmt: skip
    it = fetcher(site, names)
    assert it.fetch(f"{here}/1", 4096).data == PNG and [path for _, path in site.asked] == ["/1", "/2", "/3"]
    for path in ("evil", "port", "ip", "file", "data", "user", "meta", "relative", "gopher"):
        with pytest.raises(FetchError) as caught:
            it.fetch(f"{here}/{path}", 4096)
        assert caught.value.is_refused
    with pytest.raises(FetchError, match="without a location"):
        it.fetch(f"{here}/none", 4096)
    site.asked.clear()
    with pytest.raises(FetchError, match="more than 3 times"):
        it.fetch(f"{here}/loop", 4096)
    assert len(site.asked) == 4
    with pytest.raises(FetchError, match="more than 0 times"):
        fetcher(site, names, max_redirects=0).fetch(f"{here}/1", 4096)


def test_a_redirect_to_a_name_whose_address_is_special_is_not_followed(site: Site) -> None:
    site.paths["/"] = redirect(f"http://b.test:{site.port}/3")
    names = Names(a_test=LOCAL, b_test=[["10.0.0.1"]])
    with pytest.raises(FetchError, match="special address"):
        fetcher(site, names).fetch(f"http://a.test:{site.port}/", 4096)
    assert names.asked == ["a.test", "b.test"]


@pytest.mark.parametrize(("respond", "told"), [
    (send(b"x" * 5000), "5000 bytes"), (send(b"x" * 5000, length=False), "more than 4096 bytes"), (send(status=404), "404"),
    (send(status=500), "500"), (send(status=204), "204"), (send(status=206), "206"), (send(content_type="text/html"), "text/html"),
    (send(content_type="image/svg+xml"), "svg"), (send(content_type=""), "''"), (send(content_encoding="gzip"), "compressed"),
    (send(content_length="99999999999999999999", length=False), "could not be fetched|bytes"),
])  # fmt: skip
def test_what_is_not_an_image_of_that_size_is_refused(site: Site, respond: Respond, told: str) -> None:
    site.paths["/"] = respond
    with pytest.raises(FetchError, match=told):
        fetcher(site, Names(a_test=LOCAL)).fetch(f"http://a.test:{site.port}/", 4096)


def trickle(head: bytes, piece: bytes) -> Callable[[Site], Respond]:
    def of(site: Site) -> Respond:
        def respond(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(head)
            while not site.ended.wait(0.02):
                handler.wfile.write(piece)

        return respond

    return of


@pytest.mark.parametrize("make", [
    trickle(b"", b""), trickle(b"HTTP/1.1 200 OK\r\nx: ", b"y"), trickle(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    trickle(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 4000\r\n\r\n", b"z"),
    trickle(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nz\r\n"),
], ids=["silent", "head", "continue", "body", "chunked"])  # fmt: skip
def test_a_server_that_takes_its_time_is_not_waited_for(site: Site, make: Callable[[Site], Respond]) -> None:
    site.paths["/"] = make(site)
    with pytest.raises(FetchError, match="within 0.3 s") as caught:
        fetcher(site, Names(a_test=LOCAL), timeout_s=0.3).fetch(f"http://a.test:{site.port}/", 4096)
    assert not caught.value.is_refused  # it may be faster the next time


def test_a_body_that_ends_early_is_no_image(site: Site) -> None:
    site.paths["/"] = send(b"x" * 10, length=False, content_length="100")
    with pytest.raises(FetchError, match="could not be fetched"):
        fetcher(site, Names(a_test=LOCAL)).fetch(f"http://a.test:{site.port}/", 4096)


def test_a_name_that_is_not_there_and_a_closed_port_are_failures_of_elsewhere(site: Site) -> None:
    with pytest.raises(FetchError, match="could not be fetched") as caught:
        fetcher(site, Names()).fetch(f"http://a.test:{site.port}/", 4096)
    assert not caught.value.is_refused
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(FetchError, match="could not be fetched"):
        fetcher(site, Names(a_test=LOCAL), allow_hosts=(f"a.test:{port}",)).fetch(f"http://a.test:{port}/", 4096)


@contextmanager
def plain_listener() -> Iterator[tuple[int, list[bytes]]]:
    """A server that speaks no TLS and keeps what it is sent."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        listener.settimeout(60.0)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                got.append(connection.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], got
        thread.join()


def test_tls_asks_for_the_name_and_nothing_is_sent_in_the_clear() -> None:
    with plain_listener() as (port, got):
        rules = FetchRules(allow_hosts=(f"a.test:{port}",), allow_networks=("127.0.0.1/32",), timeout_s=60.0)
        with pytest.raises(FetchError, match="could not be fetched"):
            ImageFetcher(rules, SystemClock(), Names(a_test=LOCAL)).fetch(f"https://a.test:{port}/secret", 4096)
    (hello,) = got
    assert hello[:1] == b"\x16" and b"a.test" in hello and b"secret" not in hello  # SNI is the name, not the address


def certificate(folder: Path, name: str) -> Path:
    """Self-signed, with its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2020, 1, 1)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(start).not_valid_after(start + datetime.timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / f"{name}.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


def test_over_tls_the_certificate_must_be_of_the_name_though_an_address_is_called(site: Site, tmp_path: Path) -> None:
    path = certificate(tmp_path, "a.test")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    site.server.socket = server.wrap_socket(site.server.socket, server_side=True)
    site.paths |= {"/": send(), "/down": redirect(f"http://a.test:{site.port}/")}
    names = Names(a_test=LOCAL, b_test=LOCAL)
    hosts = (f"a.test:{site.port}", f"b.test:{site.port}")
    rules = FetchRules(allow_hosts=hosts, allow_http=True, allow_networks=("127.0.0.1/32",), timeout_s=60.0)
    trusting = ImageFetcher(rules, SystemClock(), names, ssl.create_default_context(cafile=path))
    assert trusting.fetch(f"https://a.test:{site.port}/", 4096).data == PNG
    with pytest.raises(FetchError, match="from https to something else"):
        trusting.fetch(f"https://a.test:{site.port}/down", 4096)
    for it, name in ((trusting, "b.test"), (ImageFetcher(rules, SystemClock(), names), "a.test")):  # wrong name, unknown signer
        with pytest.raises(FetchError, match="could not be fetched.*certificate|could not be fetched.*CERTIFICATE"):
            it.fetch(f"https://{name}:{site.port}/", 4096)
    assert [path for _, path in site.asked] == ["/", "/down"]
