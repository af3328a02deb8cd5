"""The executor that runs the stages of a flow with Apache Spark: `executor: spark`."""
