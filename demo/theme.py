"""The Gradio theme of the demo: system fonts and one accent colour."""

from gradio.themes import Base, Color, sizes

_STONE = "#fafaf9 #f5f5f4 #e7e5e4 #d6d3d1 #a8a29e #78716c #57534e #44403c #292524 #1c1917 #121110"
_ACCENT = "#eef5f3 #d7eae5 #b0d5cb #80b9ab #539a8a #37806f #296757 #225347 #1d433a #193831 #0c201c"


def theme() -> Base:
    """Return the theme, for light and dark mode."""
    base = Base(
        primary_hue=Color(*_ACCENT.split()),
        secondary_hue=Color(*_ACCENT.split()),
        neutral_hue=Color(*_STONE.split()),
        text_size=sizes.text_md,
        radius_size=sizes.radius_md,
        spacing_size=sizes.spacing_md,
        # Strings are system fonts: nothing is downloaded.
        font=["ui-sans-serif", "system-ui", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
    )
    return base.set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_600",  # Gradio's default has a contrast of 2.4:1
        input_placeholder_color="*neutral_600",
        input_placeholder_color_dark="*neutral_400",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_color="*neutral_200",
        block_border_color_dark="*neutral_800",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_500",
        input_border_color_focus_dark="*primary_400",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_dark="*neutral_900",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_700",
        button_border_width="1px",
        button_transition="background-color 120ms ease, border-color 120ms ease",
    )
