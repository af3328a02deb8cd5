"""Topics of Apache Pulsar: `topics: pulsar://HOST:PORT`."""
