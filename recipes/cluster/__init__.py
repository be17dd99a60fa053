"""Which machines the job runs on and how it is started there; knows nothing of training."""
