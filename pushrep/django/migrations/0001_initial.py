"""The tables, as `manage.py migrate` makes them; written by makemigrations."""

from django.db import migrations, models

import pushrep.django.models


class Migration(migrations.Migration):
    initial = True

    operations = [
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                ("topic", models.TextField()),
                ("partition", models.IntegerField()),
                ("key", models.BinaryField(null=True)),
                ("value", models.BinaryField(null=True)),
                ("headers", models.TextField(null=True)),
                ("timestamp_ms", models.BigIntegerField(null=True)),
                ("id", pushrep.django.models.IdentityField(primary_key=True, serialize=False)),
                ("xid", pushrep.django.models.XidField(db_default=pushrep.django.models.XidDefault(), editable=False)),
                ("created", models.TextField(db_default=pushrep.django.models.CreatedDefault(), editable=False)),
            ],
            options={
                "db_table": "pushrep_outbox",
            },
        ),
        migrations.CreateModel(
            name="ParkedRow",
            fields=[
                ("topic", models.TextField()),
                ("partition", models.IntegerField()),
                ("key", models.BinaryField(null=True)),
                ("value", models.BinaryField(null=True)),
                ("headers", models.TextField(null=True)),
                ("timestamp_ms", models.BigIntegerField(null=True)),
                ("id", pushrep.django.models.NumberField(primary_key=True, serialize=False)),
                ("xid", pushrep.django.models.XidField()),
                ("created", models.TextField()),
                ("why", models.TextField()),
            ],
            options={
                "db_table": "pushrep_outbox_parked",
            },
        ),
        migrations.CreateModel(
            name="RelayRow",
            fields=[
                ("topic", models.TextField(primary_key=True, serialize=False)),
                ("version", models.IntegerField()),
                ("outbox_id", models.TextField()),
                ("directory_id", models.TextField()),
                ("generation", models.BigIntegerField()),
                ("leader_epoch", models.BigIntegerField()),
                ("system_id", models.TextField()),
                ("epoch", models.IntegerField()),
                ("batch", models.BigIntegerField()),
                ("is_open", models.IntegerField()),
                ("snapshot", models.TextField(null=True)),
                ("previous", models.TextField(null=True)),
                ("ends", models.TextField()),
                ("relayed", models.BigIntegerField()),
            ],
            options={
                "db_table": "pushrep_outbox_relay",
            },
        ),
    ]
