//! Lists of pages, each of which is in one of them at most.

/// No page.
const NONE: u32 = u32::MAX;

/// Doubly linked lists over the same pages, from the most to the least recent one.
pub(super) struct PageLists<const N: usize> {
    /// The neighbours of each page: the more recent one, and the less recent one.
    links: Vec<[u32; 2]>,
    /// The list that each page is in; N for none.
    list_of: Vec<u8>,
    /// The most and the least recent page of each list.
    ends: [[u32; 2]; N],
    lengths: [usize; N],
}

impl<const N: usize> PageLists<N> {
    pub fn new(pages: usize) -> PageLists<N> {
        PageLists {
            links: vec![[NONE; 2]; pages],
            list_of: vec![N as u8; pages],
            ends: [[NONE; 2]; N],
            lengths: [0; N],
        }
    }

    /// Returns the number of pages of a list.
    pub fn len(&self, list: usize) -> usize {
        self.lengths[list]
    }

    /// Returns the list that a page is in.
    pub fn list_of(&self, page: u32) -> Option<usize> {
        Some(self.list_of[page as usize] as usize).filter(|list| *list < N)
    }

    /// Makes a page the most recent one of a list, and takes it out of any other.
    pub fn put(&mut self, page: u32, list: usize) {
        self.remove(page);
        let newest = self.ends[list][0];
        self.links[page as usize] = [NONE, newest];
        match newest {
            NONE => self.ends[list][1] = page,
            newest => self.links[newest as usize][0] = page,
        }
        self.ends[list][0] = page;
        self.list_of[page as usize] = list as u8;
        self.lengths[list] += 1;
    }

    /// Takes a page out of its list, if it is in one.
    pub fn remove(&mut self, page: u32) {
        let Some(list) = self.list_of(page) else { return };
        let [newer, older] = self.links[page as usize];
        match newer {
            NONE => self.ends[list][0] = older,
            newer => self.links[newer as usize][1] = older,
        }
        match older {
            NONE => self.ends[list][1] = newer,
            older => self.links[older as usize][0] = newer,
        }
        self.list_of[page as usize] = N as u8;
        self.lengths[list] -= 1;
    }

    /// Returns the least recent page of a list.
    pub fn oldest(&self, list: usize) -> Option<u32> {
        Some(self.ends[list][1]).filter(|page| *page != NONE)
    }
}
