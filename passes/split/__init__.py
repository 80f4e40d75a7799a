"""From joint graphs to stages: what is kept between F, B and W, the four graphs, and what runs them."""
