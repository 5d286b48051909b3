"""What somebody who asks a running run is told, and how it is asked."""
