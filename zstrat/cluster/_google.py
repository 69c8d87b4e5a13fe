"""The one door to Google's client library, for the resolvers that ask Google Cloud."""

from __future__ import annotations

from typing import Any, Final

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
