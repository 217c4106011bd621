from django.apps import AppConfig


class AppUnderTest(AppConfig):
    """Its label differs from its module, as in many projects."""

    name = "tests.app"
    label = "testapp"
