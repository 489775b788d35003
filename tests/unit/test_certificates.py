"""When a certificate expires, read from its DER; and files that are watched for changes."""

import os
import ssl
from calendar import timegm

import pytest

from pushrep.errors import BadArgument
from pushrep.replicate.certificates import CertificateFiles, Reloading, expires_s, mutual_tls, signatures
from tests.unit.gated_disk import until

UTC_TIME, GENERALIZED_TIME, SEQUENCE, INTEGER, EXPLICIT_0 = 0x17, 0x18, 0x30, 0x02, 0xA0


def der(tag, *parts):
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 0x80 else bytes([0x81, size]) if size < 0x100 else bytes([0x82]) + size.to_bytes(2)
    return bytes([tag]) + length + content


def pem(not_after, *, kind=UTC_TIME, has_version=True, issuer=b"ca"):
    """A certificate as far as its validity stands in it (RFC 5280, 4.1)."""
    validity = der(SEQUENCE, der(UTC_TIME, b"200101000000Z"), der(kind, not_after))
    version = [der(EXPLICIT_0, der(INTEGER, b"\x02"))] if has_version else []
    parts = [der(INTEGER, b"\x01"), der(SEQUENCE), der(SEQUENCE, der(0x0C, issuer)), validity, der(SEQUENCE, b"rest")]
    return ssl.DER_cert_to_PEM_cert(der(SEQUENCE, der(SEQUENCE, *version, *parts), der(SEQUENCE)))


@pytest.fixture
def file(tmp_path):
    def write(name, *certificates):
        (tmp_path / name).write_text("some words\n" + "\n".join(certificates))
        return tmp_path / name

    return write


Y2030, Y2040, Y2060 = (timegm((year, 2, 3, 4, 5, 6)) for year in (2030, 2040, 2060))
IN_2030, IN_2040, IN_2060 = pem(b"300203040506Z"), pem(b"400203040506Z"), pem(b"20600203040506Z", kind=GENERALIZED_TIME)


@pytest.mark.parametrize("issuer", [b"ca", b"a long name " * 30], ids=["short", "long"])
@pytest.mark.parametrize("has_version", [True, False])
@pytest.mark.parametrize(
    ("not_after", "kind", "expected"),
    [(b"300203040506Z", UTC_TIME, Y2030), (b"20600203040506Z", GENERALIZED_TIME, Y2060)],
)
def test_a_date_is_read_in_either_form_of_either_version(file, not_after, kind, expected, has_version, issuer):
    assert expires_s(file("a.pem", pem(not_after, kind=kind, has_version=has_version, issuer=issuer))) == expected


def test_the_first_of_a_chain_counts_and_of_several_authorities_the_last_to_expire(file):
    first = file("cert.pem", IN_2040, IN_2030)
    assert expires_s(first) == Y2040
    assert expires_s(first, file("old.pem", IN_2030)) == Y2030, "without its authority it is worth nothing"
    assert expires_s(first, file("ca.pem", IN_2030, IN_2060)) == Y2040, "an old one beside its successor"
    assert expires_s(None, file("ca.pem", IN_2030, IN_2060)) == Y2060


@pytest.mark.parametrize(
    "text",
    [
        "",
        ssl.DER_cert_to_PEM_cert(b""),
        ssl.DER_cert_to_PEM_cert(der(SEQUENCE, der(SEQUENCE))),
        ssl.DER_cert_to_PEM_cert(bytes([SEQUENCE, 0x20, SEQUENCE, 0])),
        pem(b"no date at all"),
        pem(b"301303040506Z"),
    ],
    ids=["empty", "nothing", "no parts", "cut off", "no date", "month 13"],
)
def test_what_is_no_certificate_is_refused_with_the_files_name(file, text):
    with pytest.raises(BadArgument, match=r"odd\.pem"):
        expires_s(file("odd.pem", text))
    with pytest.raises(BadArgument, match=r"absent\.pem can't be read"):
        expires_s(file("odd.pem", text).with_name("absent.pem"))


@pytest.mark.parametrize("absent", ["cert", "key", "ca"])
def test_a_context_names_the_file_that_is_not_there(file, absent):
    given = {name: file(f"{name}.pem", IN_2030) for name in ("cert", "key", "ca")}
    given[absent] = given[absent].with_name("absent.pem")
    with pytest.raises(BadArgument, match=r"absent\.pem can't be read: No such file") as refused:
        mutual_tls(**given)
    assert refused.value.argument == absent
    with pytest.raises(BadArgument, match=r"ca\.pem holds no certificate in PEM"):
        CertificateFiles(*(file(f"{name}.pem", "no certificate") for name in ("cert", "key", "ca"))).context()


def test_a_file_that_is_written_again_or_replaced_or_removed_is_seen(file):
    path = file("a.pem", IN_2030)
    seen = [signatures([path])]
    os.utime(path, ns=(1, 1))
    seen.append(signatures([path]))
    path.write_text("longer than it was " * 100)
    os.utime(path, ns=(1, 1))
    seen.append(signatures([path]))
    other = path.with_name("b.pem")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(1, 1))
    other.replace(path)
    seen.append(signatures([path]))
    path.unlink()
    assert signatures([path]) == [None]
    assert len({str(one) for one in seen}) == 4


def test_files_are_read_again_when_they_change_or_somebody_asks_and_a_mistake_ends_nothing(file):
    path, count, wrong = file("a.pem", IN_2030), [0], [BadArgument("cert", "it is odd"), OSError("gone")]

    def reload():
        count[0] += 1
        if wrong:
            raise wrong.pop()

    watched = Reloading([path], reload, 0.001)
    watched.start()
    try:
        for n, change in enumerate([watched.soon, lambda: path.write_text("other"), path.unlink], start=1):
            change()
            until(lambda n=n: count[0] == n, "it is read once for each change")
    finally:
        watched.stop()
    watched.soon()
    watched.stop()
    assert count == [3]
    Reloading([path], reload).stop()  # one that was never started
