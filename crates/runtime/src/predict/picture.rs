//! Pictures in PNG and JPEG files, as inputs and outputs of packages.

use crate::{Error, Result};
use anemoe_mlpackage::mil::{ColorSpace, FeatureShape};
use anemoe_npz::{Array, ArrayData};
use image::imageops::FilterType;
use image::{DynamicImage, GrayImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};
use std::io::Cursor;
use std::path::Path;

/// Longest picture file that is read, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Most pixels that a picture is scaled to: as many as its decoder may hold in 512 MiB at 4 bytes a pixel.
const MAX_PIXELS: u64 = 128 << 20;

/// Reads a picture upright, as its file says.
///
/// # Errors
/// The file cannot be read, is neither PNG nor JPEG, is damaged, or takes more than 512 MiB.
pub(super) fn read(path: &Path) -> Result<DynamicImage> {
    let bytes = anemoe_io::read_input(path, MAX_BYTES).map_err(|e| Error::io(path, e))?;
    let decoded = || -> image::ImageResult<DynamicImage> {
        let mut decoder = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?.into_decoder()?;
        let mut limits = Limits::default();
        limits.reserve(decoder.total_bytes())?;
        decoder.set_limits(limits)?;
        let orientation = decoder.orientation()?;
        let mut picture = DynamicImage::from_decoder(decoder)?;
        picture.apply_orientation(orientation);
        Ok(picture)
    };
    decoded().map_err(|e| match e {
        image::ImageError::Unsupported(_) => {
            Error::unsupported(path, format!("picture: {e}; read are PNG and JPEG"))
        }
        e => Error::invalid(path, format!("picture: {e}")),
    })
}

/// Makes a picture of pixels as other programs hold them: `[height, width]`, or `[height, width, channels]` in the order red,
/// green, blue. `None` for other arrays.
pub(super) fn of_pixels(array: &Array) -> Option<DynamicImage> {
    let ArrayData::U8(pixels) = &array.data else { return None };
    let size = |i: usize| u32::try_from(array.shape[i]).ok();
    let pixels = pixels.clone();
    match array.shape[..] {
        [_, _] | [_, _, 1] => Some(GrayImage::from_raw(size(1)?, size(0)?, pixels)?.into()),
        [_, _, 3] => Some(RgbImage::from_raw(size(1)?, size(0)?, pixels)?.into()),
        [_, _, 4] => Some(image::RgbaImage::from_raw(size(1)?, size(0)?, pixels)?.into()),
        _ => None,
    }
}

/// Returns a picture as a program takes it, `[1, channels, height, width]`: numbers from 0 to 255, or from 0 to 1 for
/// fp16 gray. A picture of a size that the input does not take is scaled to its default size, whatever the proportions.
///
/// # Errors
/// The input's size is too large, or unknown.
pub(super) fn planes(
    picture: &DynamicImage,
    color: ColorSpace,
    shape: &FeatureShape,
) -> std::result::Result<Array, String> {
    let own = [u64::from(picture.height()), u64::from(picture.width())];
    let [height, width] = size(shape, own).ok_or("the input has no size")?;
    if height == 0 || width == 0 || height.checked_mul(width).is_none_or(|n| n > MAX_PIXELS) {
        return Err(format!("the input takes pictures of {width} x {height} pixels"));
    }
    let scaled;
    let picture = if [height, width] == own {
        picture
    } else {
        scaled = picture.resize_exact(width as u32, height as u32, FilterType::Triangle);
        &scaled
    };
    let data: Vec<f32> = match color {
        ColorSpace::Grayscale => picture.to_luma8().iter().map(|&v| f32::from(v)).collect(),
        ColorSpace::GrayscaleFloat16 => picture.to_luma32f().into_raw(),
        ColorSpace::Rgb | ColorSpace::Bgr => {
            let order = if color == ColorSpace::Rgb { [0, 1, 2] } else { [2, 1, 0] };
            let pixels = picture.to_rgb8();
            let plane = |channel: usize| pixels.pixels().map(move |p| f32::from(p.0[channel]));
            order.into_iter().flat_map(plane).collect()
        }
    };
    let shape = [1, color.channels(), height, width].map(|n| n as usize).to_vec();
    Array::new(shape, data).ok_or_else(|| "the picture has another size than its header says".into())
}

/// Returns height and width that a picture gets: its own where the input takes them, else the default.
fn size(shape: &FeatureShape, own: [u64; 2]) -> Option<[u64; 2]> {
    let takes = match shape {
        FeatureShape::Enumerated(all) => all.iter().any(|s| s.get(2..) == Some(&own)),
        FeatureShape::Range { ranges, .. } => {
            let mut sizes = own.iter().zip(ranges.iter().skip(2));
            sizes.all(|(n, (low, high))| low <= n && high.is_none_or(|high| *n <= high))
        }
        FeatureShape::Fixed(_) | FeatureShape::Dynamic => false,
    };
    if takes { Some(own) } else { shape.default()?.get(2..)?.try_into().ok() }
}

/// Encodes an output `[1, channels, height, width]` as PNG; the inverse of [`planes`].
pub(super) fn encode(array: &Array, color: ColorSpace) -> std::result::Result<Vec<u8>, String> {
    let [1, channels, height, width] = array.shape[..] else {
        return Err(format!("an array of shape {:?} is no picture", array.shape));
    };
    let (rows, columns) = (u32::try_from(height), u32::try_from(width));
    let (Ok(rows), Ok(columns), true) = (rows, columns, channels as u64 == color.channels()) else {
        return Err(format!("an array of shape {:?} is no picture", array.shape));
    };
    let full = if color == ColorSpace::GrayscaleFloat16 { 255.0 } else { 1.0 };
    let values: Vec<u8> = array.to_f32().iter().map(|v| (v * full).round().clamp(0.0, 255.0) as u8).collect();
    let picture: Option<DynamicImage> = match color {
        ColorSpace::Grayscale | ColorSpace::GrayscaleFloat16 => {
            GrayImage::from_raw(columns, rows, values).map(Into::into)
        }
        ColorSpace::Rgb | ColorSpace::Bgr => {
            let order = if color == ColorSpace::Rgb { [0, 1, 2] } else { [2, 1, 0] };
            let plane = height * width;
            let pixel = |i: usize| order.map(|channel| values[channel * plane + i]);
            RgbImage::from_raw(columns, rows, (0..plane).flat_map(pixel).collect()).map(Into::into)
        }
    };
    let mut out = Cursor::new(Vec::new());
    picture
        .ok_or("an output without pixels")?
        .write_to(&mut out, ImageFormat::Png)
        .map_err(|e| e.to_string())?;
    Ok(out.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> DynamicImage {
        // Red, green / blue, white.
        let pixels = vec![255, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255];
        RgbImage::from_raw(2, 2, pixels).unwrap().into()
    }

    fn write(dir: &Path, name: &str, format: ImageFormat) -> std::path::PathBuf {
        let path = dir.join(name);
        picture().save_with_format(&path, format).unwrap();
        path
    }

    #[test]
    fn channels_come_in_the_package_s_order() {
        let fixed = |channels| FeatureShape::Fixed(vec![1, channels, 2, 2]);
        let rgb = planes(&picture(), ColorSpace::Rgb, &fixed(3)).unwrap();
        assert_eq!(rgb.shape, [1, 3, 2, 2]);
        assert_eq!(rgb.to_f32(), [255., 0., 0., 255., 0., 255., 0., 255., 0., 0., 255., 255.]);
        let bgr = planes(&picture(), ColorSpace::Bgr, &fixed(3)).unwrap();
        assert_eq!(bgr.to_f32()[..4], rgb.to_f32()[8..]);
        let gray = planes(&picture(), ColorSpace::Grayscale, &fixed(1)).unwrap().to_f32();
        let half = planes(&picture(), ColorSpace::GrayscaleFloat16, &fixed(1)).unwrap().to_f32();
        assert!(
            gray[3] == 255.0 && (half[3] - 1.0).abs() < 1e-3 && gray[1] > gray[0] && gray[0] > gray[2],
            "{gray:?} {half:?}"
        );
        for (array, color) in [(&rgb, ColorSpace::Rgb), (&bgr, ColorSpace::Bgr)] {
            let png = image::load_from_memory(&encode(array, color).unwrap()).unwrap();
            assert_eq!(png.to_rgb8(), picture().to_rgb8());
        }
        assert!(encode(&gray_array(), ColorSpace::Rgb).is_err());
    }

    fn gray_array() -> Array {
        Array::new(vec![1, 1, 1, 2], vec![0f32, 300.0]).unwrap()
    }

    #[test]
    fn sizes_follow_the_input() {
        let shape = |picture: &DynamicImage, shape| planes(picture, ColorSpace::Rgb, &shape).unwrap().shape;
        assert_eq!(shape(&picture(), FeatureShape::Fixed(vec![1, 3, 5, 7])), [1, 3, 5, 7]);
        let listed =
            |sizes: [[u64; 2]; 2]| FeatureShape::Enumerated(sizes.map(|[h, w]| vec![1, 3, h, w]).to_vec());
        assert_eq!(shape(&picture(), listed([[4, 4], [2, 2]])), [1, 3, 2, 2]);
        assert_eq!(shape(&picture(), listed([[4, 6], [3, 2]])), [1, 3, 4, 6]);
        let range = |low| FeatureShape::Range {
            default: vec![1, 3, 8, 9],
            ranges: vec![(1, Some(1)), (3, Some(3)), (low, None), (low, Some(9))],
        };
        assert_eq!(shape(&picture(), range(1)), [1, 3, 2, 2]);
        assert_eq!(shape(&picture(), range(3)), [1, 3, 8, 9]);
        let huge = FeatureShape::Fixed(vec![1, 3, 1 << 40, 1 << 40]);
        assert!(planes(&picture(), ColorSpace::Rgb, &huge).is_err());
    }

    #[test]
    fn files_are_png_and_jpeg() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(&write(dir.path(), "a.png", ImageFormat::Png)).unwrap(), picture());
        // The contents decide, not the name.
        assert_eq!(read(&write(dir.path(), "b.png", ImageFormat::Jpeg)).unwrap().width(), 2);
        let other = dir.path().join("c.png");
        for bytes in [&b"GIF89a\x01\0\x01\0\0\0\0;"[..], b"", b"\x89PNG\r\n\x1a\n", b"no picture at all"] {
            std::fs::write(&other, bytes).unwrap();
            let e = read(&other).unwrap_err().to_string();
            assert!(e.contains("c.png") && e.contains("picture"), "{e}");
        }
    }

    #[test]
    fn pixels_of_other_programs_are_pictures() {
        let array = Array::new(vec![2, 2, 3], picture().to_rgb8().into_raw()).unwrap();
        assert_eq!(of_pixels(&array).unwrap(), picture());
        assert!(of_pixels(&Array::new(vec![2, 3], vec![0u8; 6]).unwrap()).is_some());
        assert!(of_pixels(&Array::new(vec![2, 3, 5], vec![0u8; 30]).unwrap()).is_none());
        assert!(of_pixels(&gray_array()).is_none());
    }
}
