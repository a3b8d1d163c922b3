//! `cp.async.bulk.tensor`: tiles from global to shared memory by the tensor memory accelerator.

use super::{
    Result,
    access::{Author, Heard, Writer},
    block::{Block, WARP},
    cluster::Message,
    convert::within,
    decode::{Operands, Place, Value},
    thread::PARAMETER_WINDOW,
};

/// The arguments of `cuTensorMapEncodeTiled`, or of `cuTensorMapEncodeIm2col`: dimensions from the innermost on, and zeros for everything
/// outside.
#[derive(Clone, Debug)]
pub struct TensorMap {
    /// Where the tensor starts in global memory.
    pub address: u64,
    /// The bytes of an element.
    pub element: usize,
    /// Its dimensions, up to five.
    pub sizes: Vec<u64>,
    /// The distances between neighbors of all dimensions but the innermost, in bytes.
    pub pitches: Vec<u64>,
    /// The tile; the channels and the pixels if there is a window.
    pub tile: Vec<u32>,
    /// Where the pixels are, from a first one on, if the tile is none of a tensor's elements side by side.
    pub window: Option<Window>,
    /// The bytes of a row of the swizzle: 32, 64 or 128, or 0 for none.
    pub swizzle: u64,
}

/// The pixels that a window begins at, one after the other: of a tensor of images, whose first dimension are channels.
#[derive(Clone, Debug)]
pub struct Window {
    /// For each spatial dimension, the first pixel.
    pub lower: Vec<i32>,
    /// And what is added to its size for the end.
    pub upper: Vec<i32>,
    /// From one pixel to the next.
    pub steps: Vec<u32>,
}

impl TensorMap {
    /// Checks what `cuTensorMapEncodeTiled`, or `cuTensorMapEncodeIm2col`, requires.
    pub fn check(&self) -> Result<()> {
        let rank = self.sizes.len();
        let tile = match &self.window {
            None => self.tile.len() == rank,
            Some(window) => {
                let dims = [&window.lower, &window.upper].map(Vec::len);
                let spatial = (3..=5).contains(&rank).then(|| rank - 2);
                let dims = spatial.is_some_and(|spatial| dims == [spatial; 2]);
                let steps = window.steps.iter().all(|step| (1..=8).contains(step));
                dims && steps && window.steps.len() + 2 == rank && self.tile.len() == 2
            }
        };
        let ranks = (1..=5).contains(&rank) && self.pitches.len() + 1 == rank && tile;
        let pitch = |pitch: &u64| pitch.is_multiple_of(16) && *pitch < 1 << 40;
        let aligned = self.address.is_multiple_of(16) && self.pitches.iter().all(pitch);
        let sizes = self.sizes.iter().all(|size| (1..=1 << 32).contains(size));
        let most = if self.window.is_some() { 1024 } else { 256 };
        let rows = self.tile.get(1).is_none_or(|rows| *rows <= most);
        let others = self.tile.iter().enumerate().filter(|(at, _)| *at != 1);
        let tile = rows && self.tile.iter().all(|size| *size > 0);
        let tile = tile && others.into_iter().all(|(_, size)| *size <= 256);
        // A row of a tile has at most the bytes of the swizzle.
        let row = if ranks { self.row() } else { 0 };
        let row = row.is_multiple_of(16) && (self.swizzle == 0 || row <= self.swizzle);
        // Dimensions do not overlap.
        let width = self
            .sizes
            .first()
            .map_or(0, |size| size * self.element as u64);
        let apart = self.pitches.first().is_none_or(|pitch| *pitch >= width);
        match ranks && aligned && sizes && tile && row && apart {
            true => Ok(()),
            false => Err(format!("a tensor map that is refused: {self:?}")),
        }
    }

    /// The bytes of a row of the tile.
    fn row(&self) -> u64 {
        u64::from(self.tile[0]) * self.element as u64
    }

    /// The bytes of the tile.
    fn bytes(&self) -> usize {
        self.tile.iter().product::<u32>() as usize * self.element
    }
}

/// `[to], [map, {column, row}], [barrier]`, for a window the offset in it, and for multicast the blocks of the cluster that receive the
/// tile, as bits.
pub(super) struct Load {
    to: Place,
    map: Place,
    coordinates: Vec<Value>,
    barrier: Place,
    offset: Vec<Value>,
    blocks: Option<Value>,
}

/// The tiles in flight, with the phases of their barriers that they count for.
#[derive(Debug, Default)]
pub(super) struct Loads(Vec<(Tile, u32)>);

#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    map: usize,
    /// The first element, innermost dimension first.
    first: [i32; 5],
    /// From each pixel of a window.
    offset: [u16; 3],
    to: u64,
    barrier: u64,
}

impl Loads {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Load> {
    let (rank, kind) = opcode
        .strip_prefix("cp.async.bulk.tensor.")?
        .split_once("d.shared::cluster.global.")?;
    let (is_window, kind) = match kind.strip_prefix("im2col.") {
        Some(kind) => (true, kind),
        None => (false, kind.strip_prefix("tile.")?),
    };
    let blocks = match kind.strip_prefix("mbarrier::complete_tx::bytes")? {
        "" => None,
        ".multicast::cluster" => Some(operands.value(3 + usize::from(is_window))),
        _ => return None,
    };
    let (map, coordinates) = operands.tensor(1);
    assert_eq!(Ok(coordinates.len()), rank.parse(), "{}", operands.text());
    let offset = if is_window {
        operands.values(3)
    } else {
        Vec::new()
    };
    let spatial = if is_window { coordinates.len() - 2 } else { 0 };
    assert_eq!(offset.len(), spatial, "{}", operands.text());
    Some(Load {
        to: operands.place(0),
        map,
        coordinates,
        barrier: operands.place(2),
        offset,
        blocks,
    })
}

impl Block<'_> {
    pub(super) fn tma_load(&mut self, thread: usize, load: &Load) -> Result<()> {
        let map = self.address(thread, &load.map)?;
        let map = within(PARAMETER_WINDOW, map).ok_or("the tensor map is no parameter")? as usize;
        let number = self
            .parameters
            .get(map..map + 8)
            .filter(|_| map.is_multiple_of(64));
        let number = number.ok_or("no tensor map is there")?.try_into().unwrap();
        let number = (u64::from_le_bytes(number) as usize).checked_sub(1);
        let number = number.filter(|number| *number < self.maps.len());
        let map = number.ok_or("the parameter is no tensor map")?;
        let swizzle = self.maps[map].swizzle;
        if self.maps[map].sizes.len() != load.coordinates.len() {
            return Err("the tensor has another rank".into());
        }
        if self.maps[map].window.is_some() == load.offset.is_empty() {
            return Err("the tensor map is for other instructions".into());
        }
        let to = self.address(thread, &load.to)?;
        let barrier = self.address(thread, &load.barrier)?;
        let mut first = [0; 5];
        for (first, value) in first.iter_mut().zip(&load.coordinates) {
            *first = self.value(thread, *value)? as u32 as i32;
        }
        let mut offset = [0; 3];
        for (offset, value) in offset.iter_mut().zip(&load.offset) {
            *offset = self.value(thread, *value)? as u16;
        }
        // The swizzle repeats every 8 rows. Tiles that begin elsewhere would be legal, but would be read differently.
        if !to.is_multiple_of((8 * swizzle).max(128)) {
            return Err(format!("a tile at {to:#x}"));
        }
        let tile = Tile {
            map,
            first,
            offset,
            to,
            barrier,
        };
        let warp = self.first_warp + thread / WARP;
        let heard = self.threads[thread].heard.clone();
        let blocks = match load.blocks {
            Some(blocks) => self.value(thread, blocks)?,
            None => 1 << self.number,
        };
        for number in (0..u64::BITS as usize).filter(|number| blocks >> number & 1 == 1) {
            if number == self.number {
                let phase = self.phase_for_tma(barrier, thread)?;
                let author = Author {
                    thread,
                    warp,
                    heard: &heard,
                };
                self.announce_tile(tile, phase, &author)?;
            } else {
                let heard = heard.clone();
                self.tell(number, Message::Load { tile, warp, heard });
            }
        }
        Ok(())
    }

    /// A tile that another block of the cluster, by a thread that has heard so much, requests for this one.
    pub(super) fn load_from_afar(&mut self, tile: Tile, warp: usize, heard: &Heard) -> Result<()> {
        self.check_published(tile.barrier)?;
        let thread = usize::MAX;
        let phase = self.phase_for_tma(tile.barrier, thread)?;
        let author = Author {
            thread,
            warp,
            heard,
        };
        self.announce_tile(tile, phase, &author)
    }

    fn announce_tile(&mut self, tile: Tile, phase: u32, author: &Author) -> Result<()> {
        let bytes = self.maps[tile.map].bytes();
        self.shared.announce(tile.to, bytes, author, true)?;
        self.loads.0.push((tile, phase));
        Ok(())
    }

    /// Delivers one of the tiles that a barrier waits for: the last one requested, because no order is promised.
    pub(super) fn arrive_one(&mut self, barrier: u64) -> Result<()> {
        let Some(index) = self
            .loads
            .0
            .iter()
            .rposition(|(tile, _)| tile.barrier == barrier)
        else {
            return Ok(());
        };
        let (tile, phase) = self.loads.0.remove(index);
        let map = self.maps[tile.map].clone();
        let writer = Writer::Tma { barrier, phase };
        let (row, element) = (map.row(), map.element as u64);
        let rows = match &map.window {
            Some(window) => pixels(&map, window, &tile),
            None => lines(&map, &tile),
        };
        for (number, at) in rows.iter().enumerate() {
            // Whether the row is inside, and where, from the tensor's start.
            let (mut inside, mut start) = (true, 0);
            for (dimension, &along) in (1..).zip(at) {
                inside &= along >= 0 && (along as u64) < map.sizes[dimension];
                start += along * map.pitches[dimension - 1] as i64;
            }
            for chunk in 0..row / 16 {
                let mut bytes = [0; 16];
                for (index, piece) in bytes.chunks_exact_mut(map.element).enumerate() {
                    let column =
                        i64::from(tile.first[0]) + (16 * chunk / element) as i64 + index as i64;
                    if inside && column >= 0 && (column as u64) < map.sizes[0] {
                        let offset = start + column * element as i64;
                        let address = map.address.wrapping_add_signed(offset);
                        self.global.borrow_mut().read(address, piece, false)?;
                    }
                }
                let place = tile.to + number as u64 * row + 16 * chunk;
                self.shared
                    .land(swizzled_by(map.swizzle, place), &bytes, writer)?;
            }
        }
        self.complete_bytes(barrier, map.bytes())
    }
}

/// For each row of a tile, where it is along each dimension but the innermost.
fn lines(map: &TensorMap, tile: &Tile) -> Vec<Vec<i64>> {
    let row = |number: u32| {
        let mut rest = number;
        let along = |dimension: usize| {
            let size = map.tile[dimension];
            let along = i64::from(tile.first[dimension]) + i64::from(rest % size);
            rest /= size;
            along
        };
        (1..map.tile.len()).map(along).collect()
    };
    (0..map.tile[1..].iter().product()).map(row).collect()
}

/// The same for the pixels of a window: from the first on, line after line, and image after image.
fn pixels(map: &TensorMap, window: &Window, tile: &Tile) -> Vec<Vec<i64>> {
    let spatial = window.steps.len();
    let mut pixel: Vec<i64> = tile.first[1..2 + spatial]
        .iter()
        .map(|&at| at.into())
        .collect();
    let mut rows = Vec::new();
    for _ in 0..map.tile[1] {
        let mut row = pixel.clone();
        for (at, offset) in row.iter_mut().zip(&tile.offset[..spatial]) {
            *at += i64::from(*offset);
        }
        rows.push(row);
        let (image, places) = pixel.split_last_mut().expect("an image's number");
        let mut ended = true;
        for (dim, at) in places.iter_mut().enumerate() {
            *at += i64::from(window.steps[dim]);
            ended = *at >= map.sizes[dim + 1] as i64 + i64::from(window.upper[dim]);
            if !ended {
                break;
            }
            *at = window.lower[dim].into();
        }
        *image += i64::from(ended);
    }
    rows
}

/// A swizzle by its row's bytes: in an address, the number of the 16-byte chunk in the row is combined with that of the row of 128
/// bytes by exclusive or.
fn swizzled_by(row: u64, address: u64) -> u64 {
    match row {
        0 => address,
        _ => address ^ (address >> 7 & (row / 16 - 1)) << 4,
    }
}

/// The 128-byte swizzle.
pub(super) fn swizzled(address: u64) -> u64 {
    swizzled_by(128, address)
}
