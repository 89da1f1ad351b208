"""Errors that are meant for users: each message says what is wrong and names the mend."""


class PolysiliconError(Exception):
    """Base of every error whose message is shown to the user as it is, without a traceback."""


class ConfigError(PolysiliconError):
    """A flag, a configuration file or an environment variable cannot be used."""


class ModelError(PolysiliconError):
    """A model file or directory is missing, malformed, or of a kind that is not supported."""


class TemplateError(PolysiliconError):
    """A chat template cannot be compiled or rendered for these messages."""


class RequestError(PolysiliconError):
    """A request's parameters or prompt cannot be served."""


class PluginError(PolysiliconError):
    """A backend was asked for that is missing, broken, blocked or built for another contract."""


class DownloadError(PolysiliconError):
    """A model could not be fetched or does not match its checksum."""


class ServiceUnavailable(PolysiliconError):
    """A request cannot be taken now: the engine is starting, restarting or gone, or the server is
    shutting down. retry_after: seconds after which it may go better, None when it will not."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(ServiceUnavailable):
    """Admission control refuses a request: those before it need more than the server lets wait."""
