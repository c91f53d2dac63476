"""The bytes of Pulsar's protocol: frames, entries, chunks, schemas and ids."""
