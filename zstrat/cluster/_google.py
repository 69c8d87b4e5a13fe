"""Google Cloud: the one door to its client library, and what a machine's metadata say.

Resolvers that ask Google Cloud come through here. What a machine of it can ask about
itself, its metadata server answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)


def build_service(
    name: str,
    version: str,
    credentials: Any = "default",
    discovery_url: str | None = None,
) -> Any:
    """The client of one of Google's services.

    Args:
        credentials: "default": those that Google's library finds on this machine.
        discovery_url: Where the description of the service is. None: in the library.

    Raises:
        ImportError: The library is not installed.
        RuntimeError: There are no credentials on this machine.
    """
    try:
        import google.auth
        from googleapiclient import discovery
    except ImportError as error:
        raise ImportError(
            "googleapiclient must be installed before asking Google Cloud for a "
            "cluster: pip install 'zstrat[gce]'"
        ) from error
    if credentials == "default":
        try:
            credentials, _ = google.auth.default(scopes=_SCOPES)
        except google.auth.exceptions.DefaultCredentialsError as error:
            raise RuntimeError(
                f"there are no Google credentials on this machine: {error}. "
                "Run gcloud auth application-default login, or give credentials"
            ) from error
    return discovery.build(
        name,
        version,
        credentials=credentials,
        discoveryServiceUrl=discovery_url,
        cache_discovery=False,
    )


_HOST: Final = "metadata.google.internal"
_VARIABLES: Final = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
_MARK: Final = "Metadata-Flavor"
_PATIENCE: Final = 5.0
"""Seconds for connecting and for the answer: the server is on the same host."""
_LONGEST: Final = 1024 * 1024
"""Bytes of an answer; the addresses of the largest TPU pod are a tenth of it."""


def metadata_host(env: Mapping[str, str]) -> str:
    """``host[:port]`` of the metadata server, by the variables that Google's own
    libraries read."""
    return next((env[name] for name in _VARIABLES if env.get(name)), _HOST)


def ask_metadata(host: str, path: str) -> str | None:
    """The entry ``path`` (as "instance/zone"), None if the server has none of it.

    Raises:
        RuntimeError: Nothing answers at ``host``, or it is no metadata server.
    """
    import http.client

    line = http.client.HTTPConnection(host, timeout=_PATIENCE)
    try:
        line.request("GET", f"/computeMetadata/v1/{path}", headers={_MARK: "Google"})
        answer = line.getresponse()
        text = answer.read(_LONGEST).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"Google's metadata server {host} does not answer: {error}. Is this a "
            "machine of Google Cloud?"
        ) from error
    finally:
        line.close()
    if answer.getheader(_MARK) != "Google":
        raise RuntimeError(f"{host} answers, and is no metadata server of Google")
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise RuntimeError(
            f"the metadata server {host} answers {path!r} with {answer.status} "
            f"{answer.reason}"
        )
    return text
