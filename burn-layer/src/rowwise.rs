//! What kernels share that compute something of each row of a tensor, along its last dimension.

use burn_backend::{DType, Shape};
use burn_cubecl::{
    CubeDevice,
    kernel::{into_contiguous, untile},
    ops::{numeric::empty_device_contiguous_dtype, permute},
    tensor::CubeTensor,
};
use cubecl::{client::Client, ir::features::Plane, prelude::*};

/// The most cubes of a kernel. With fewer, each takes several rows.
const CUBES: usize = 1 << 15;

/// The fewest and the most units of a cube on a GPU.
const FEWEST: usize = 32;
const UNITS: usize = 512;

/// The bytes that a unit loads at a time.
const BYTES: usize = 16;

/// The most elements of a row that a unit keeps in its registers.
const HELD: usize = 32;

/// Up to so many elements, rows that end within loads are read one element at a time, by so few units that these need not wait for each
/// other (where they are a plane), and keep them.
const SHORT: usize = 256;

/// The units of a cube, for its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Units {
    pub(crate) count: usize,
    /// How many of them read each other's registers: those of a plane, or 1.
    plane: usize,
}

impl Units {
    fn new(client: &Client, count: usize) -> Self {
        let plane = plane_of(client).filter(|plane| count.is_multiple_of(*plane));
        Self {
            count,
            plane: plane.unwrap_or(1),
        }
    }
}

/// How the rows of a tensor without gaps are read.
pub(crate) struct Rows {
    /// Elements of a row.
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// Elements of a load. Where these do not divide a row, it begins and ends within one.
    pub(crate) vector: usize,
    /// Units of a cube.
    pub(crate) units: Units,
    /// How elements are counted.
    pub(crate) address: AddressType,
}

impl Rows {
    /// Those of `shape`, in loads of elements of so many bytes.
    pub(crate) fn of(client: &Client, shape: &Shape, size: usize) -> Self {
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape.num_elements() / columns.max(1);
        let on_processor = client.properties().hardware.num_cpu_cores.is_some();
        let fits = |vector: usize| (columns * rows).is_multiple_of(vector) && vector <= columns;
        let mut rows = Self::with_loads(client, [columns, rows], size, fits);
        if rows.group() > 1 && columns <= SHORT && !on_processor {
            rows.vector = 1;
            rows.units = Units::new(client, FEWEST);
        }
        rows
    }

    /// The same, in loads that divide a row.
    pub(crate) fn of_whole_loads(client: &Client, shape: &Shape, size: usize) -> Self {
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape.num_elements() / columns.max(1);
        Self::with_loads(client, [columns, rows], size, |vector| {
            columns.is_multiple_of(vector)
        })
    }

    fn with_loads(
        client: &Client,
        [columns, rows]: [usize; 2],
        size: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Self {
        let sizes = [8, 4, 2, 1].into_iter();
        let vector = sizes
            .filter(|vector| vector * size <= BYTES)
            .find(|&vector| fits(vector))
            .unwrap_or(1);
        let hardware = &client.properties().hardware;
        // On processors, units that wait for each other cost more than they save.
        let count = match hardware.num_cpu_cores {
            Some(_) => 1,
            // Two loads for each, or more.
            None => {
                let most = hardware.max_units_per_cube as usize;
                let units = columns.div_ceil(2 * vector).next_power_of_two();
                units.clamp(FEWEST, UNITS.min(most))
            }
        };
        Self {
            columns,
            rows,
            vector,
            units: Units::new(client, count),
            address: address(columns * rows),
        }
    }

    /// The fewest rows that end where a load ends. They divide all rows, because the loads divide all elements.
    pub(crate) fn group(&self) -> usize {
        let divides = |group: &usize| (group * self.columns).is_multiple_of(self.vector);
        (1..=self.vector).find(divides).unwrap_or(1)
    }

    /// How many loads of a row a unit keeps: all of its own, or none if these are too many or rows are not of whole loads.
    pub(crate) fn held(&self) -> usize {
        let loads = (self.columns / self.vector).div_ceil(self.units.count);
        match self.group() == 1 && loads * self.vector <= HELD {
            true => loads,
            false => 0,
        }
    }

    pub(crate) fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units.count as u32)
    }
}

/// The units of a plane, if all planes of the device have as many, and can exchange registers.
fn plane_of(client: &Client) -> Option<usize> {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let exchanges = [Plane::Ops, Plane::Sync];
    let same = hardware.plane_size_min == hardware.plane_size_max;
    let plane = hardware.plane_size_max as usize;
    let able = exchanges
        .iter()
        .all(|op| properties.features.plane.contains(*op));
    (able && same && plane.is_power_of_two()).then_some(plane)
}

/// How kernels count so many elements, and somewhat further.
pub(crate) fn address(elements: usize) -> AddressType {
    #[cfg(test)]
    if tests::WIDE.get() {
        return AddressType::U64;
    }
    AddressType::from_len(2 * elements)
}

/// The most elements that kernels count on a device.
pub(crate) fn most(device: &CubeDevice) -> usize {
    match device
        .client()
        .properties()
        .supports_address(AddressType::U64)
    {
        true => usize::MAX / 2,
        false => u32::MAX as usize / 2,
    }
}

/// As many cubes as tasks, or fewer.
pub(crate) fn cubes(tasks: usize) -> CubeCount {
    CubeCount::new_1d(tasks.clamp(1, CUBES) as u32)
}

/// The tensor without gaps.
pub(crate) fn plain(tensor: CubeTensor) -> CubeTensor {
    into_contiguous(untile(tensor))
}

/// `[batch, .., channels]` without gaps, of `[batch, channels, ..]`. A convolution's output is a view of this; others are copied.
pub(crate) fn channels_last(tensor: CubeTensor) -> CubeTensor {
    let mut axes: Vec<usize> = (0..tensor.meta.num_dims()).collect();
    axes[1..].rotate_left(1);
    plain(permute(untile(tensor), &axes))
}

/// A tensor of that shape and dtype, where `like` is.
pub(crate) fn empty(like: &CubeTensor, (shape, dtype): (Shape, DType)) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// The shape and dtype of a number of each row.
pub(crate) fn of_rows(shape: &Shape) -> (Shape, DType) {
    let mut shape = shape.clone();
    if let Some(last) = shape.as_mut_slice().last_mut() {
        *last = 1;
    }
    (shape, DType::F32)
}

/// The sum, or the maximum, of what all units of a cube have. All of them must call this.
#[cube]
pub(crate) fn of_cube(
    own: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] units: Units,
    #[comptime] maximum: bool,
) -> f32 {
    let own = of_plane(own, comptime!(units.plane), maximum);
    let planes = comptime!(units.count / units.plane);
    if comptime!(planes == 1) {
        own
    } else {
        // Each plane has one number now.
        let place = UNIT_POS as usize / comptime!(units.plane);
        // Other units may still be reading the previous result.
        sync_cube();
        if UNIT_POS as usize == place * comptime!(units.plane) {
            shared[place] = own;
        }
        if comptime!(units.plane > 1) {
            sync_cube();
            let mut result = shared[0];
            #[unroll]
            for other in 1..planes {
                result = combined(result, shared[other], maximum);
            }
            result
        } else {
            #[unroll]
            for halving in 0..comptime!(planes.ilog2()) {
                let half = comptime!(planes >> (halving + 1));
                sync_cube();
                if place < half {
                    shared[place] = combined(shared[place], shared[place + half], maximum);
                }
            }
            sync_cube();
            shared[0]
        }
    }
}

/// The sum, or the maximum, of what all units of a plane have. All of them must call this.
#[cube]
fn of_plane(own: f32, #[comptime] plane: usize, #[comptime] maximum: bool) -> f32 {
    let mut result = own;
    if comptime!(plane > 1) {
        // CUDA's C++ backend exchanges between the units that run at the same time, which is all of them after this.
        sync_plane();
        #[unroll]
        for halving in 0..comptime!(plane.ilog2()) {
            let distance = comptime!(plane as u32 >> (halving + 1));
            result = combined(result, plane_shuffle_xor(result, distance), maximum);
        }
    }
    result
}

#[cube]
fn combined(one: f32, other: f32, #[comptime] maximum: bool) -> f32 {
    if comptime!(maximum) {
        max_nan(one, other)
    } else {
        one + other
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    #[cfg(any(feature = "cpu", feature = "cuda"))]
    use burn_backend::{TensorData, ops::FloatTensorOps};
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    use burn_cubecl::CubeBackend;
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    use burn_std::reader::try_read_sync;

    use super::*;

    thread_local! {
        /// Whether kernels count in 64 bits whatever the size, because a test has no room for so many elements.
        pub(super) static WIDE: Cell<bool> = const { Cell::new(false) };
    }

    /// Calls `body` with each device whose kernels can be tried, which count in 32 bits, and then in 64.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn on_devices(body: impl Fn(&CubeDevice)) {
        let mut devices = Vec::new();
        #[cfg(feature = "cpu")]
        devices.push(CubeDevice::Cpu(Default::default()));
        #[cfg(feature = "cuda")]
        if burn::tensor::Device::enumerate(burn::tensor::DeviceType::Cuda).is_empty() {
            println!("SKIPPED: there is no CUDA device");
        } else {
            devices.push(CubeDevice::Cuda(Default::default()));
        }
        for device in &devices {
            body(device);
            WIDE.set(true);
            body(device);
            WIDE.set(false);
        }
    }

    /// Numbers in f32.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn tensor(values: &[f64], shape: [usize; 2], device: &CubeDevice) -> CubeTensor {
        let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        CubeBackend::float_from_data(TensorData::new(values, shape), device)
    }

    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn assert_close(found: CubeTensor, expected: &[f64]) {
        assert_eq!(found.dtype, DType::F32);
        let found = try_read_sync(CubeBackend::float_into_data(found));
        let found = found.unwrap().unwrap().try_to_vec::<f32>().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let distance = (f64::from(*found) - expected).abs();
            assert!(
                distance < 1e-5 * expected.abs().max(1.0),
                "{found} {expected}"
            );
        }
    }

    #[test]
    fn elements_are_counted_in_as_many_bits_as_they_need() {
        let most = u32::MAX as usize / 2;
        for (elements, expected) in [
            (1, AddressType::U32),
            (most, AddressType::U32),
            (most + 1, AddressType::U64),
        ] {
            assert_eq!(address(elements), expected, "{elements}");
        }
    }
}
