//! The kernels. A cube takes the channels of a tile, and the pixels of a part.

use burn_backend::{DType, Shape, TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::tensor::CubeTensor;
use cubecl::{client::Client, prelude::*};

use crate::rowwise::{Rows, address, empty, plain};

/// The units of a cube on a GPU.
const UNITS: usize = 256;

/// How many of these are side by side, at most, along the channels.
const SIDE: usize = 32;

/// The cubes that keep a large GPU busy.
const CUBES: usize = 1024;

/// The fewest pixels that each unit takes.
const PIXELS: usize = 4;

/// How pixels and channels are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Units side by side, each of which takes a load of channels.
    across: usize,
    /// Units that take one pixel after the other in turn.
    down: usize,
}

/// The cubes of a tensor.
struct Parts {
    tile: Tile,
    /// The number of tiles of channels, and of parts of pixels.
    tiles: usize,
    parts: usize,
    /// The pixels of a part. The last one may have fewer.
    pixels: usize,
}

impl Parts {
    fn new(client: &Client, [pixels, width]: [usize; 2]) -> Self {
        let units = match client.properties().hardware.num_cpu_cores {
            // On processors, units that wait for each other cost more than they save.
            Some(_) => 1,
            None => UNITS.min(client.properties().hardware.max_units_per_cube as usize),
        };
        let across = width.next_power_of_two().min(SIDE).min(units);
        let tile = Tile {
            across,
            down: 1 << (units / across).ilog2(),
        };
        let tiles = width.div_ceil(across);
        let most = (CUBES / tiles).max(1);
        let pixels_of_part = pixels.div_ceil(most).max(PIXELS * tile.down);
        Self {
            tile,
            tiles,
            parts: pixels.div_ceil(pixels_of_part),
            pixels: pixels_of_part,
        }
    }
}

/// How the pixels of tensors lie, and where numbers of their channels go.
struct Pixels {
    pixels: usize,
    /// Elements of a load, and loads of a pixel.
    vector: usize,
    width: usize,
    parts: Parts,
    /// Two numbers of each channel of a part, and of all.
    partial: [CubeTensor; 2],
    outputs: [CubeTensor; 2],
}

impl Pixels {
    /// Those of `[batch, .., channels]` without gaps, of elements of so many bytes.
    fn of(x: &CubeTensor, size: usize) -> Self {
        let shape = x.shape();
        let channels = shape.last().copied().unwrap_or(1);
        let pixels = shape.num_elements() / channels.max(1);
        let rows = Shape::new([pixels, channels]);
        let vector = Rows::of_whole_loads(&x.client, &rows, size).vector;
        let width = channels / vector;
        let parts = Parts::new(&x.client, [pixels, width]);
        let mut of_channels = vec![1; shape.num_dims()];
        of_channels[1] = channels;
        let numbers = |shape: Shape| [(); 2].map(|()| empty(x, (shape.clone(), DType::F32)));
        Self {
            pixels,
            vector,
            width,
            partial: numbers(Shape::new([parts.parts, channels])),
            outputs: numbers(Shape::from(of_channels)),
            parts,
        }
    }

    fn dim(&self) -> CubeDim {
        let Tile { across, down } = self.parts.tile;
        CubeDim::new_1d((across * down) as u32)
    }

    /// A cube for each tile of each part, and one for each tile.
    fn cubes(&self) -> [CubeCount; 2] {
        let Parts { tiles, parts, .. } = self.parts;
        [tiles * parts, tiles].map(|cubes| CubeCount::new_1d(cubes as u32))
    }

    fn address(&self) -> AddressType {
        address(self.pixels * self.width * self.vector)
    }
}

/// The mean and the variance of each channel of `[batch, .., channels]` without gaps: `[1, channels, 1, ..]`.
pub(super) fn moments(x: CubeTensor) -> [CubeTensor; 2] {
    let of = Pixels::of(&x, x.dtype.size());
    let [of_parts, of_all] = of.cubes();
    let client = x.client.clone();
    let dtype = dtype_to_storage_type(x.dtype);
    let [means, squares] = of.partial.clone().map(CubeTensor::into_buffer_arg);
    part_moments_kernel::launch(
        &client,
        of_parts,
        of.dim(),
        of.address(),
        of.vector,
        x.into_buffer_arg(),
        means,
        squares,
        of.pixels,
        of.width,
        of.parts.pixels,
        of.parts.tile,
        dtype,
    );
    let [means, squares] = of.partial.clone().map(CubeTensor::into_buffer_arg);
    let [mean, variance] = of.outputs.clone().map(CubeTensor::into_buffer_arg);
    moments_kernel::launch(
        &client,
        of_all,
        of.dim(),
        of.address(),
        of.vector,
        means,
        squares,
        mean,
        variance,
        of.pixels,
        of.width,
        of.parts.pixels,
        of.parts.tile,
    );
    of.outputs
}

/// The sums by channel of a tensor, and of its product with another one less a number of each channel, in the same form.
pub(super) fn sums([a, b]: [CubeTensor; 2], center: CubeTensor) -> [CubeTensor; 2] {
    let size = a.dtype.size().max(b.dtype.size());
    let of = Pixels::of(&a, size);
    let [of_parts, of_all] = of.cubes();
    let client = a.client.clone();
    let dtypes = [a.dtype, b.dtype].map(dtype_to_storage_type);
    let [sums, products] = of.partial.clone().map(CubeTensor::into_buffer_arg);
    part_sums_kernel::launch(
        &client,
        of_parts,
        of.dim(),
        of.address(),
        of.vector,
        a.into_buffer_arg(),
        b.into_buffer_arg(),
        plain(center).into_buffer_arg(),
        sums,
        products,
        of.pixels,
        of.width,
        of.parts.pixels,
        of.parts.tile,
        dtypes,
    );
    let [sums, products] = of.partial.clone().map(CubeTensor::into_buffer_arg);
    let [sum, product] = of.outputs.clone().map(CubeTensor::into_buffer_arg);
    sums_kernel::launch(
        &client,
        of_all,
        of.dim(),
        of.address(),
        of.vector,
        sums,
        products,
        sum,
        product,
        of.parts.parts,
        of.width,
        of.parts.tile,
    );
    of.outputs
}

/// The mean of each channel of a part's pixels, and the sum of the squares of the distances from it.
#[cube(launch, address_type = "dynamic")]
fn part_moments_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    means: &mut [Vector<f32, N>],
    squares: &mut [Vector<f32, N>],
    pixels: usize,
    width: usize,
    of_part: usize,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(tile.across * tile.down));
    let across = comptime!(tile.across);
    let tiles = width.div_ceil(across);
    let column = CUBE_POS % tiles * across + UNIT_POS as usize % across;
    let down = UNIT_POS as usize / across;
    let part = CUBE_POS / tiles;
    let first = part * of_part;
    let end = min(first + of_part, pixels);
    let mut origin = Vector::<f32, N>::new(0.0f32);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut square = Vector::<f32, N>::new(0.0f32);
    if column < width {
        origin = Vector::<f32, N>::cast_from(x[first * width + column]);
        let mut pixel = first + down;
        while pixel < end {
            let distance = Vector::<f32, N>::cast_from(x[pixel * width + column]) - origin;
            sum += distance;
            square += distance * distance;
            pixel += comptime!(tile.down);
        }
    }
    let sum = of_column::<N>(sum, &mut shared, tile);
    let square = of_column::<N>(square, &mut shared, tile);
    if column < width && down == 0 {
        let inverse = f32::new(1.0) / f32::cast_from(end - first);
        let mean = sum * Vector::new(inverse);
        means[part * width + column] = origin + mean;
        squares[part * width + column] = square - sum * mean;
    }
}

/// The mean and the variance of each channel, of those of its parts.
#[cube(launch, address_type = "dynamic")]
fn moments_kernel<N: Size>(
    means: &[Vector<f32, N>],
    squares: &[Vector<f32, N>],
    mean: &mut [Vector<f32, N>],
    variance: &mut [Vector<f32, N>],
    pixels: usize,
    width: usize,
    of_part: usize,
    #[comptime] tile: Tile,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(tile.across * tile.down));
    let across = comptime!(tile.across);
    let column = CUBE_POS * across + UNIT_POS as usize % across;
    let down = UNIT_POS as usize / across;
    let parts = pixels.div_ceil(of_part);
    let inverse = f32::new(1.0) / f32::cast_from(pixels);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let mut part = down;
        while part < parts {
            let count = f32::cast_from(min(of_part, pixels - part * of_part));
            sum += means[part * width + column] * Vector::new(count * inverse);
            part += comptime!(tile.down);
        }
    }
    let center = of_column::<N>(sum, &mut shared, tile);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let mut part = down;
        while part < parts {
            let count = f32::cast_from(min(of_part, pixels - part * of_part));
            let distance = means[part * width + column] - center;
            sum += squares[part * width + column] + distance * distance * Vector::new(count);
            part += comptime!(tile.down);
        }
    }
    let square = of_column::<N>(sum, &mut shared, tile);
    if column < width && down == 0 {
        mean[column] = center;
        variance[column] = square * Vector::new(inverse);
    }
}

/// The sums of a part's pixels by channel.
#[cube(launch, address_type = "dynamic")]
fn part_sums_kernel<F: Float, G: Float, N: Size>(
    a: &[Vector<F, N>],
    b: &[Vector<G, N>],
    center: &[Vector<f32, N>],
    sums: &mut [Vector<f32, N>],
    products: &mut [Vector<f32, N>],
    pixels: usize,
    width: usize,
    of_part: usize,
    #[comptime] tile: Tile,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(tile.across * tile.down));
    let across = comptime!(tile.across);
    let tiles = width.div_ceil(across);
    let column = CUBE_POS % tiles * across + UNIT_POS as usize % across;
    let down = UNIT_POS as usize / across;
    let part = CUBE_POS / tiles;
    let first = part * of_part;
    let end = min(first + of_part, pixels);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut product = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let center = center[column];
        let mut pixel = first + down;
        while pixel < end {
            let at = pixel * width + column;
            let value = Vector::<f32, N>::cast_from(a[at]);
            sum += value;
            product += value * (Vector::<f32, N>::cast_from(b[at]) - center);
            pixel += comptime!(tile.down);
        }
    }
    let sum = of_column::<N>(sum, &mut shared, tile);
    let product = of_column::<N>(product, &mut shared, tile);
    if column < width && down == 0 {
        sums[part * width + column] = sum;
        products[part * width + column] = product;
    }
}

/// The sums of all parts.
#[cube(launch, address_type = "dynamic")]
fn sums_kernel<N: Size>(
    sums: &[Vector<f32, N>],
    products: &[Vector<f32, N>],
    sum: &mut [Vector<f32, N>],
    product: &mut [Vector<f32, N>],
    parts: usize,
    width: usize,
    #[comptime] tile: Tile,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(tile.across * tile.down));
    let across = comptime!(tile.across);
    let column = CUBE_POS * across + UNIT_POS as usize % across;
    let down = UNIT_POS as usize / across;
    let mut own = Vector::<f32, N>::new(0.0f32);
    let mut own_product = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let mut part = down;
        while part < parts {
            own += sums[part * width + column];
            own_product += products[part * width + column];
            part += comptime!(tile.down);
        }
    }
    let own = of_column::<N>(own, &mut shared, tile);
    let own_product = of_column::<N>(own_product, &mut shared, tile);
    if column < width && down == 0 {
        sum[column] = own;
        product[column] = own_product;
    }
}

/// The sum of what the units below each other have, for all of them. All units of the cube must call this.
#[cube]
fn of_column<N: Size>(
    own: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] tile: Tile,
) -> Vector<f32, N> {
    if comptime!(tile.down == 1) {
        own
    } else {
        let across = comptime!(tile.across);
        let place = UNIT_POS as usize;
        // Other units may still be reading the previous sum.
        sync_cube();
        shared[place] = own;
        #[unroll]
        for halving in 0..comptime!(tile.down.ilog2()) {
            let half = comptime!(tile.across * (tile.down >> (halving + 1)));
            sync_cube();
            if place < half {
                shared[place] = shared[place] + shared[place + half];
            }
        }
        sync_cube();
        shared[place % across]
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests;
