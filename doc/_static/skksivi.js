/* A figure of an example leads to itself in full size, for small screens. */
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("img.sphx-glr-single-img")) {
    const link = document.createElement("a");
    link.href = image.srcset ? image.srcset.split(",").pop().trim().split(" ")[0] : image.src;
    image.replaceWith(link);
    link.append(image);
  }
});
