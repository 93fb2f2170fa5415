"""Reading Catalyst's plans: all that holds live objects of the JVM."""
