//! What kernels share that compute something of each row of a tensor, along its last dimension.

use burn_backend::{DType, Shape};
use burn_cubecl::{
    kernel::{into_contiguous, untile},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::{client::Client, prelude::*};

/// The most cubes of a kernel. With fewer, each takes several rows.
const CUBES: usize = 1 << 15;

/// The most units of a cube.
const UNITS: usize = 512;

/// The bytes that a unit loads at a time.
const BYTES: usize = 16;

/// How the rows of a tensor without gaps are read.
pub(crate) struct Rows {
    /// Elements of a row.
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// Elements of a load. Where these do not divide a row, it begins and ends within one.
    pub(crate) vector: usize,
    /// Units of a cube.
    pub(crate) units: usize,
}

impl Rows {
    /// Those of `shape`, in loads of elements of so many bytes.
    pub(crate) fn of(client: &Client, shape: &Shape, size: usize) -> Self {
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape.num_elements() / columns.max(1);
        Self::with_loads(client, [columns, rows], size, |vector| {
            (columns * rows).is_multiple_of(vector) && vector <= columns
        })
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
        // On processors, units that wait for each other cost more than they save.
        let units = match client.properties().hardware.num_cpu_cores {
            Some(_) => 1,
            // Two loads for each, or more.
            None => {
                let most = client.properties().hardware.max_units_per_cube as usize;
                let units = columns.div_ceil(2 * vector).next_power_of_two();
                units.clamp(32, UNITS.min(most))
            }
        };
        Self {
            columns,
            rows,
            vector,
            units,
        }
    }

    /// The fewest rows that end where a load ends. They divide all rows, because the loads divide all elements.
    pub(crate) fn group(&self) -> usize {
        let divides = |group: &usize| (group * self.columns).is_multiple_of(self.vector);
        (1..=self.vector).find(divides).unwrap_or(1)
    }

    pub(crate) fn dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
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
    #[comptime] units: usize,
    #[comptime] maximum: bool,
) -> f32 {
    if comptime!(units == 1) {
        own
    } else {
        let unit = UNIT_POS as usize;
        // Other units may still be reading the previous result.
        sync_cube();
        shared[unit] = own;
        #[unroll]
        for halving in 0..comptime!(units.ilog2()) {
            let half = comptime!(units >> (halving + 1));
            sync_cube();
            if unit < half {
                let (one, other) = (shared[unit], shared[unit + half]);
                if comptime!(maximum) {
                    shared[unit] = max_nan(one, other);
                } else {
                    shared[unit] = one + other;
                }
            }
        }
        sync_cube();
        shared[0]
    }
}
