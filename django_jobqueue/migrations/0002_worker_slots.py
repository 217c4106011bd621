from django.db import migrations, models


class Migration(migrations.Migration):
    """Workers of an older release go on: both columns have values they need not give."""

    dependencies = [("django_jobqueue", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="worker",
            name="full_since",
            field=models.DateTimeField(
                help_text="Since when no slot has been free.", null=True, verbose_name="full since"
            ),
        ),
        migrations.AddField(
            model_name="worker",
            name="hung_slots",
            field=models.SmallIntegerField(
                db_default=0,
                help_text="Busy with a handler that is past its timeout.",
                verbose_name="hung slots",
            ),
        ),
    ]
