"""The app, as INSTALLED_APPS finds it."""

from django.apps import AppConfig


class PushrepConfig(AppConfig):
    """`pushrep.django`."""

    name = "pushrep.django"
    label = "pushrep"
    verbose_name = "pushrep's outbox"
