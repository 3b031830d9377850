"""For tests, of users too: a fake model server and the reference policy."""
