"""Mutual TLS between processes that share a secret, without a certificate authority.

The secret is a key with its own certificate. Both ends present this certificate and accept no
other, so a process without the key can neither connect nor listen.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile

_YEARS = datetime.timedelta(days=3650)
"""Validity before and after now. The clocks of hosts may differ; a secret is used only once."""


def new_secret() -> bytes:
    """Create a private key and its certificate, in PEM."""
    from cryptography import x509  # takes 40 ms: only large objects need it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nbdist")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _YEARS)
        .not_valid_after(now + _YEARS)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(pem)


def tls_context(secret: bytes, *, is_server: bool) -> ssl.SSLContext:
    """Return the context of one end.

    Args:
        secret: key and certificate, from `new_secret`.
        is_server: True for the end that accepts connections.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is the identity
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(prefix="nbdist-") as file:  # mode 0600
        file.write(secret)
        file.flush()
        context.load_cert_chain(file.name)
        context.load_verify_locations(file.name)
    return context
