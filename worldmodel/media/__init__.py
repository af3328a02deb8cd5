"""Reading and writing of images and videos: the only part of the library that decodes or encodes them.

Files are recognised by their first bytes, never by their name, and only the formats of a `MediaLimits` reach
a decoder. Its size limits are checked before and while decoding. Frames are RGB uint8 `[t, h, w, 3]`, cropped
around their centre to the wanted aspect ratio and resized. Decoders run in the calling process: a server
that takes uploads calls these functions in a restricted child process.
"""

from worldmodel.media.contact_sheet import contact_sheet
from worldmodel.media.encoding import VideoWriter, write_video
from worldmodel.media.image import Frame, crop_and_resize, read_image, write_image
from worldmodel.media.info import MediaInfo, probe, sample_frames
from worldmodel.media.limits import MediaLimits
from worldmodel.media.observation import read_observation
from worldmodel.media.shared_video import frame_size, shared_video
from worldmodel.media.source import Source
from worldmodel.media.video import Frames, Video, open_video, read_video

__all__ = [
    "Frame",
    "Frames",
    "MediaInfo",
    "MediaLimits",
    "Source",
    "Video",
    "VideoWriter",
    "contact_sheet",
    "crop_and_resize",
    "frame_size",
    "open_video",
    "probe",
    "read_image",
    "read_observation",
    "read_video",
    "sample_frames",
    "shared_video",
    "write_image",
    "write_video",
]
